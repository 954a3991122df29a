"""What each process has of a model that is divided among those that compute each layer together.

`pipeline/models/sharding.py` says which layers are divided. What the processes find is joined
where it is used: without gradients in generation, with them in training.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pipeline.errors import require
from pipeline.models.quantized import is_transposed
from pipeline.models.sharding import OF_KEYS, STYLES, ShardedLayers, layer_of, match
from pipeline.parallel.group import Group
from pipeline.parallel.shards import Shard, ShardSpec


class TensorShards(ShardedLayers):
    """What each process of a group has of a model's layers.

    Args:
        model: on any device; nothing is changed before `narrow`.
        tp_group: the processes that share it out; with one nothing is divided.
        setting: that the user gave, as messages name it before the number.
        fix: what to do if they can't be divided.
        divides_head: whether the matrix that makes the logits may be divided.

    Raises:
        ConfigError: the family has no plan, or its heads or widths can't be cut into so many.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tp_group: Group,
        *,
        setting: str = "inference_tp_size",
        fix: str = "set it to 1",
        divides_head: bool = True,
    ) -> None:
        super().__init__(model, tp_group.size, setting=setting, fix=fix, divides_head=divides_head)
        self.tp_group = tp_group

    @property
    def kv_heads_here(self) -> int:
        """Heads of keys that this process has."""
        share = self.kv_heads // self.size if self.divides_keys else self.kv_heads
        return max(1, share)

    def spec(
        self, owner: str, leaf: str, shape: torch.Size, *, rank: int | None = None
    ) -> ShardSpec | None:
        """The part of a weight of this whole shape that a process has; None is all of it.

        It is this process unless the `rank` in the group of another is given.
        """
        name = self.styles.get(owner)
        if name is None:
            return None
        rank = self.tp_group.rank if rank is None else rank
        style = STYLES[name]
        transposed = is_transposed(layer_of(self.model.get_submodule(owner)))
        if leaf == "weight":
            dim = int(style.by_outputs == transposed)
            return ShardSpec(dim, tuple(self._shards(owner, name, shape[dim], rank)))
        if style.by_outputs:
            return ShardSpec(0, tuple(self._shards(owner, name, shape[0], rank)))
        # The bias is added once.
        whole = (Shard(0, shape[0], counts=False),)
        return ShardSpec(0, whole, zero=True) if rank > 0 else None

    def _shards(self, owner: str, style: str, total: int, rank: int) -> Iterator[Shard]:
        size = self.size
        if owner.endswith(OF_KEYS) and not STYLES[style].joins and self.kv_heads < size:
            width, copies = total // self.kv_heads, size // self.kv_heads
            head = rank // copies
            yield Shard(head * width, (head + 1) * width, copies, counts=rank % copies == 0)
        elif style == "colwise_one_key_head":
            width = total // (self.num_heads + 2)
            yield self._even(owner, 0, self.num_heads * width, rank)
            yield Shard(self.num_heads * width, total, size, counts=rank == 0)
        else:
            parts = STYLES[style].parts
            for part in range(parts):
                yield self._even(owner, part * (total // parts), total // parts, rank)

    def _even(self, owner: str, first: int, total: int, rank: int) -> Shard:
        """A process's equal share of `total` elements from `first` on."""
        require(
            total % self.size == 0,
            f"{self.label} doesn't divide the width {total} of {owner}; choose one that does",
        )
        share = total // self.size
        start = first + rank * share
        return Shard(start, start + share)

    def narrow(self, *, hooks: bool = True) -> None:
        """Have the modules know the widths and heads of their parts.

        Without `hooks` they are to be given the arguments that `heads_of` makes.
        """
        for name in self.styles:
            self._narrow(name, layer_of(self.model.get_submodule(name)))
        for name, module in self.model.named_modules():
            for attribute in match(self.plan.counts, name) or ():
                setattr(module, attribute, getattr(module, attribute) // self.size)
            if hasattr(module, "num_key_value_groups") and self.divides_keys:
                share = self.num_heads // self.size
                object.__setattr__(module, "num_key_value_groups", share // self.kv_heads_here)
            if hooks and match(dict.fromkeys(self.plan.biased, True), name):
                module.register_forward_pre_hook(self._own_heads, with_kwargs=True)

    def _narrow(self, name: str, module: nn.Module) -> None:
        """A module's own idea of its width, which Conv1D computes with."""
        if isinstance(module, Conv1D):
            module.nx, module.nf = self._shape(name, module.nx, module.nf)
        elif isinstance(module, nn.Linear):
            rows, columns = module.out_features, module.in_features
            module.out_features, module.in_features = self._shape(name, rows, columns)

    def _shape(self, name: str, rows: int, columns: int) -> tuple[int, int]:
        """The shape of this process's part of a weight."""
        whole = torch.Size((rows, columns))
        spec = self.spec(name, "weight", whole)
        assert spec is not None
        rows, columns = spec.shape(whole)
        return rows, columns

    def _own_heads(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, self.heads_of(self.tp_group.rank, kwargs)

    def heads_of(self, rank: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of attention with ALiBi for the process of that rank.

        Of a bias (B * H, 1, K) or (B, H, Q, K) and a mask the rows of its heads.
        """
        share = self.num_heads // self.size
        own = partial(torch.narrow, dim=1, start=rank * share, length=share)
        bias, mask, changed = kwargs["alibi"], kwargs["attention_mask"], dict(kwargs)
        if bias.ndim == 3:
            changed["alibi"] = own(bias.unflatten(0, (-1, self.num_heads))).flatten(0, 1)
        else:
            changed["alibi"] = own(bias)
        if mask is not None and mask.shape[1] == self.num_heads > 1:
            changed["attention_mask"] = own(mask)
        return changed
