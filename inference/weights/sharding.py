"""What each process has of a model that is divided among those that compute each layer together.

`pipeline/models/sharding.py` says which layers are divided.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from inference.tp_group import join_columns, mark, sum_
from pipeline.errors import require
from pipeline.models.sharding import OF_KEYS, STYLES, ShardedLayers, match
from pipeline.parallel.group import Group


@dataclass(frozen=True)
class Shard:
    """Elements of a dimension, from `start` to before `stop`."""

    start: int
    stop: int

    counts: bool = True
    """False where a peer of lower rank has the same elements."""


@dataclass(frozen=True)
class ShardSpec:
    """The part of a weight that a process has: some shards of one dimension."""

    dim: int
    shards: tuple[Shard, ...]

    zero: bool = False
    """The process has zeros in place of it."""

    def of(self, whole: Tensor) -> Tensor:
        """The part of the whole weight."""
        if self.zero:
            return torch.zeros_like(whole)
        parts = [whole.narrow(self.dim, p.start, p.stop - p.start) for p in self.shards]
        return torch.cat(parts, dim=self.dim) if len(parts) > 1 else parts[0]

    def shape(self, whole: torch.Size) -> torch.Size:
        """Of the part."""
        sizes = list(whole)
        sizes[self.dim] = sum(self._sizes())
        return torch.Size(sizes)

    def first_held(self, part: Tensor) -> list[tuple[Tensor, int]]:
        """What no peer of lower rank has, of the part, and where its rows begin in the whole."""
        shards = zip(part.split(self._sizes(), dim=self.dim), self.shards, strict=True)
        in_rows = self.dim == part.ndim - 1
        return [(each, in_rows * shard.start) for each, shard in shards if shard.counts]

    def _sizes(self) -> list[int]:
        return [shard.stop - shard.start for shard in self.shards]


class Sharding(ShardedLayers):
    """What each process of a group has of a model's layers.

    Args:
        model: on any device; nothing is changed before `apply`.
        tp_group: the processes that share it out; with one nothing is divided.

    Raises:
        ConfigError: the family has no plan, or its heads or widths can't be cut into so many.
    """

    def __init__(self, model: PreTrainedModel, tp_group: Group) -> None:
        super().__init__(model, tp_group.size)
        self.tp_group = tp_group

    @property
    def kv_heads_here(self) -> int:
        """Heads of keys that this process has."""
        share = self.kv_heads // self.tp_group.size if self.divides_keys else self.kv_heads
        return max(1, share)

    def spec(self, owner: str, leaf: str, shape: torch.Size) -> ShardSpec | None:
        """The part of a weight of this whole shape that this process has; None is all of it."""
        name = self.styles.get(owner)
        if name is None:
            return None
        style = STYLES[name]
        transposed = isinstance(self.model.get_submodule(owner), Conv1D)
        if leaf == "weight":
            dim = int(style.by_outputs == transposed)
            return ShardSpec(dim, tuple(self._shards(owner, name, shape[dim])))
        if style.by_outputs:
            return ShardSpec(0, tuple(self._shards(owner, name, shape[0])))
        # The bias is added once.
        whole = (Shard(0, shape[0], counts=False),)
        return ShardSpec(0, whole, zero=True) if self.tp_group.rank > 0 else None

    def _shards(self, owner: str, style: str, total: int) -> Iterator[Shard]:
        rank, size = self.tp_group.rank, self.tp_group.size
        if owner.endswith(OF_KEYS) and not STYLES[style].joins and self.kv_heads < size:
            width, copies = total // self.kv_heads, size // self.kv_heads
            head = rank // copies
            yield Shard(head * width, (head + 1) * width, counts=rank % copies == 0)
        elif style == "colwise_one_key_head":
            width = total // (self.num_heads + 2)
            yield from self._even(owner, 0, self.num_heads * width)
            yield Shard(self.num_heads * width, total, counts=rank == 0)
        else:
            parts = STYLES[style].parts
            for part in range(parts):
                yield from self._even(owner, part * (total // parts), total // parts)

    def _even(self, owner: str, first: int, total: int) -> Iterator[Shard]:
        """This process's equal share of `total` elements from `first` on."""
        size = self.tp_group.size
        require(
            total % size == 0,
            f"inference_tp_size {size} doesn't divide the width {total} of {owner}; choose one that"
            " does",
        )
        share = total // size
        start = first + self.tp_group.rank * share
        yield Shard(start, start + share)

    def apply(self) -> None:
        """Have the modules compute their parts, and join what the peers find."""
        if self.tp_group.size == 1:
            return
        for name, kind in self.styles.items():
            module, style = self.model.get_submodule(name), STYLES[kind]
            self._log_width(name, module)
            if not style.by_outputs:
                module.register_forward_hook(self._sum)
            if style.joins:
                module.register_forward_hook(self._join)
            if style.splits:
                module.register_forward_pre_hook(self._split)
        for name, module in self.model.named_modules():
            for attribute in match(self.plan.counts, name) or ():
                setattr(module, attribute, getattr(module, attribute) // self.tp_group.size)
            if hasattr(module, "num_key_value_groups") and self.divides_keys:
                share = self.num_heads // self.tp_group.size
                object.__setattr__(module, "num_key_value_groups", share // self.kv_heads_here)
            if match(dict.fromkeys(self.plan.biased, True), name):
                module.register_forward_pre_hook(self._own_heads, with_kwargs=True)
        mark(self.model, self.tp_group, kv_heads=self.kv_heads_here)

    def _log_width(self, name: str, module: nn.Module) -> None:
        """A module's own idea of its width, which Conv1D computes with."""
        weight = module.get_parameter("weight")
        spec = self.spec(name, "weight", weight.shape)
        assert spec is not None
        rows, columns = spec.shape(weight.shape)
        if isinstance(module, Conv1D):
            module.nx, module.nf = rows, columns
        elif isinstance(module, nn.Linear):
            module.out_features, module.in_features = rows, columns

    def _sum(self, _module: nn.Module, _args: object, output: Tensor) -> Tensor:
        return sum_(output, self.tp_group)

    def _join(self, _module: nn.Module, _args: object, output: Tensor) -> Tensor:
        return join_columns(output, self.tp_group)

    def _split(self, _module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0].chunk(self.tp_group.size, dim=-1)[self.tp_group.rank],)

    def _own_heads(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The rows of this process's heads, of a bias (B * H, 1, K) or (B, H, Q, K) and a mask."""
        share = self.num_heads // self.tp_group.size
        own = partial(torch.narrow, dim=1, start=self.tp_group.rank * share, length=share)
        bias, mask = kwargs["alibi"], kwargs["attention_mask"]
        if bias.ndim == 3:
            kwargs["alibi"] = own(bias.unflatten(0, (-1, self.num_heads))).flatten(0, 1)
        else:
            kwargs["alibi"] = own(bias)
        if mask is not None and mask.shape[1] == self.num_heads > 1:
            kwargs["attention_mask"] = own(mask)
        return args, kwargs
