"""Generation by several processes: tensor-parallel groups, and groups with the same prompts.

The groups are attributes of the model. Time in their collectives counts as waiting.
"""

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from pipeline.models.parallel.sharding import STYLES, TensorShards
from pipeline.parallel.group import SELF_GROUP, Group, tree_sum

_TP_GROUP, _KV_HEADS = "tensor_parallel_group", "tensor_parallel_kv_heads"
_SHARING_GROUP = "same_prompts_group"


def get_tp_group(model: nn.Module) -> Group:
    """Return the group of processes that compute each layer of `model` together."""
    return getattr(model, _TP_GROUP, SELF_GROUP)


def get_local_kv_heads(model: nn.Module) -> int | None:
    """Return the number of key/value heads on this process, or None without tensor parallelism."""
    return getattr(model, _KV_HEADS, None)


def set_sharing_group(model: nn.Module, group: Group) -> None:
    """Set the group of processes that each hold a copy of the model and have the same prompts.

    Each then responds to a share of the prompts, and the whole group must generate together.
    """
    setattr(model, _SHARING_GROUP, group)


def get_sharing_group(model: nn.Module) -> Group:
    """Return the group of processes that have the same prompts, each with a copy of `model`."""
    return getattr(model, _SHARING_GROUP, SELF_GROUP)


def all_reduce_(values: Shaped[Tensor, "*S"], group: Group) -> Shaped[Tensor, "*S"]:
    """Sum `values` over the group in place; results are bitwise identical on all processes."""
    if group.size > 1 and values.is_cuda:
        dist.all_reduce(values, group=group.process_group)
    elif group.size > 1:
        values.copy_(tree_sum(group.all_gather(values, label="hidden states")))
    return values


class Sharding(TensorShards):
    """The shards of a model's layers, and the hooks through which a group computes them."""

    def apply(self) -> None:
        """Reduce the modules to this process's shards, and add the collectives."""
        if self.tp_group.size == 1:
            return
        for name, kind in self.styles.items():
            module, style = self.model.get_submodule(name), STYLES[kind]
            if not style.is_colwise:
                module.register_forward_hook(self._reduce_output)
            if style.gathers_output:
                module.register_forward_hook(self._gather_output)
            if style.splits_input:
                module.register_forward_pre_hook(self._split_input)
        self.set_local_sizes()
        setattr(self.model, _TP_GROUP, self.tp_group)
        setattr(self.model, _KV_HEADS, self.local_kv_heads)

    def _reduce_output(self, _module: nn.Module, _args: object, output: Tensor) -> Tensor:
        return all_reduce_(output, self.tp_group)

    def _gather_output(
        self, _module: nn.Module, _args: object, output: Float[Tensor, "*B n"]
    ) -> Float[Tensor, "*B m"]:
        return torch.cat(self.tp_group.all_gather(output, label="outputs"), dim=-1)

    def _split_input(self, _module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0].chunk(self.tp_group.size, dim=-1)[self.tp_group.rank],)
