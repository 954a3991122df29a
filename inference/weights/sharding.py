"""A model that several processes compute together, to generate with it."""

from torch import Tensor, nn

from inference.tp_group import join_columns, mark, of_sharding, sum_
from pipeline.models.sharding import STYLES, TensorShards


class Sharding(TensorShards):
    """What each process of a group has of a model's layers, and how they generate together."""

    def apply(self) -> None:
        """Have the modules compute their parts, and join what the processes find."""
        if self.tp_group.size == 1:
            return
        for name, kind in self.styles.items():
            module, style = self.model.get_submodule(name), STYLES[kind]
            if not style.by_outputs:
                module.register_forward_hook(self._sum)
            if style.joins:
                module.register_forward_hook(self._join)
            if style.splits:
                module.register_forward_pre_hook(self._split)
        self.narrow()
        mark(self.model, self.tp_group, kv_heads=self.kv_heads_here)

    @of_sharding
    def _sum(self, _module: nn.Module, _args: object, output: Tensor) -> Tensor:
        return sum_(output, self.tp_group)

    @of_sharding
    def _join(self, _module: nn.Module, _args: object, output: Tensor) -> Tensor:
        return join_columns(output, self.tp_group)

    @of_sharding
    def _split(self, _module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0].chunk(self.tp_group.size, dim=-1)[self.tp_group.rank],)
