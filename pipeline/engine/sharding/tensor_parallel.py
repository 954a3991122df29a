"""Parameters of tensor-parallel layers: the shards of each process, and their gradients.

Some parameters are sharded, others are replicated. For a replicated parameter each process computes
the full gradient, or a partial sum if the parameter is only used with the process's heads. The role
of a parameter determines how its gradient is reduced, once per optimizer step and in fp32, so that
each element counts once in the norm and in a checkpoint.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pipeline.parallel.device import local_device
from pipeline.parallel.group import Group, tree_sum
from pipeline.parallel.shards import ShardSpec

Role = Literal["replicated", "partial", "sharded", "overlapping"]
"""replicated: every process has the full parameter and its full gradient; partial: it has the full
parameter and a partial gradient; sharded: it has elements that no other process has; overlapping:
other processes also have some of its elements."""

_SHARD, _IS_PARTIAL = "tensor_parallel_shard", "is_partial"
"""Names of attributes set on a parameter, which is the same object in the model and its engine."""


@dataclass(frozen=True)
class ParamShard:
    """This process's shard of a parameter, and its position in the full parameter."""

    full_shape: torch.Size
    """Shape of the full parameter."""

    specs: tuple[ShardSpec, ...]
    """The shard of each process in the group, in rank order."""

    rank: int
    """Rank of this process in the group."""

    @property
    def spec(self) -> ShardSpec:
        """This process's shard."""
        return self.specs[self.rank]

    @property
    def role(self) -> Role:
        """`overlapping` if other processes also have some of the elements, else `sharded`."""
        return "overlapping" if any(shard.copies > 1 for shard in self.spec.shards) else "sharded"

    @property
    def inner(self) -> int:
        """Stride of the sharded dimension in the full parameter, in elements."""
        return self.full_shape[self.spec.dim + 1 :].numel()

    def join(self, shards: list[Tensor]) -> Tensor:
        """Assemble the full parameter from the shards of all processes."""
        full = shards[0].new_empty(self.full_shape)
        for spec, shard in zip(self.specs, shards, strict=True):
            spec.insert(shard.view(spec.shape(self.full_shape)), full)
        return full

    def shared_elements(self) -> Iterator[tuple[slice, list[int], bool]]:
        """Yield ranges that several processes have, their ranks, and whether ours is the lowest."""
        assert self.spec.dim == 0
        inner = self.inner
        for shard, begin in self.spec.with_offsets():
            if shard.copies > 1:
                first = self.rank - self.rank % shard.copies
                ranks = list(range(first, first + shard.copies))
                yield slice(begin * inner, (begin + shard.size) * inner), ranks, shard.is_first_copy


def replace_by_shard(layer: nn.Module, leaf: str, shard: ParamShard) -> None:
    """Replace a layer's parameter with this process's shard."""
    param = layer.get_parameter(leaf)
    local = shard.spec.extract(param.detach()).clone(memory_format=torch.contiguous_format)
    replacement = nn.Parameter(local, param.requires_grad)
    mark_sharded(replacement, shard)
    setattr(layer, leaf, replacement)


def mark_sharded(param: Tensor, shard: ParamShard) -> None:
    """Mark a parameter as a shard of a full one."""
    setattr(param, _SHARD, shard)


def mark_partial(param: Tensor) -> None:
    """Mark a parameter for which each process computes a partial gradient."""
    setattr(param, _IS_PARTIAL, True)


def get_shard(param: Tensor) -> ParamShard | None:
    """Return a shard's position in its full parameter, or None if the parameter isn't sharded."""
    return getattr(param, _SHARD, None)


def get_role(param: Tensor) -> Role:
    """Return the role of a parameter; a frozen one is never `partial`."""
    shard = get_shard(param)
    if shard is not None:
        return shard.role
    is_partial = getattr(param, _IS_PARTIAL, False)
    return "partial" if is_partial and param.requires_grad else "replicated"


def full_shape(param: Tensor) -> torch.Size:
    """Return the shape of the full parameter; its own shape if it is not sharded."""
    shard = get_shard(param)
    return param.shape if shard is None else shard.full_shape


ParamRange = tuple[Tensor, int, slice]
"""A parameter, the index of its first element, and its range in a vector."""


def reduce_gradient(
    gradient: Float[Tensor, " n"], role: Role, group: Group, ranges: list[ParamRange]
) -> Float[Tensor, " n"]:
    """Complete a gradient by adding the other processes' gradients of the same elements.

    All processes must call this. Each sums in rank order as a tree, so all get identical bits.
    """
    if group.size == 1 or role in ("replicated", "sharded"):
        return gradient
    on_device = gradient.to(local_device())  # it may be offloaded
    parts = group.all_gather(on_device, label="gradients of shared weights")
    parts = [part.to(gradient.device) for part in parts]
    if role == "partial":
        return tree_sum(parts)
    result = gradient.clone()
    for span, ranks, _ in _shared_ranges(ranges):
        result[span] = tree_sum([parts[rank][span] for rank in ranks])
    return result


def mask_duplicates(
    gradient: Float[Tensor, " n"], role: Role, group: Group, ranges: list[ParamRange]
) -> Float[Tensor, " n"]:
    """Return the gradient, with zeros for elements that another process adds to the norm."""
    if group.size == 1 or role == "sharded":
        return gradient
    if role in ("replicated", "partial"):
        return gradient if group.rank == 0 else torch.zeros_like(gradient)
    result = gradient.clone()
    for span, _, is_first_copy in _shared_ranges(ranges):
        if not is_first_copy:
            result[span] = 0
    return result


def _shared_ranges(ranges: list[ParamRange]) -> Iterator[tuple[slice, list[int], bool]]:
    """Apply `ParamShard.shared_elements` to a vector that contains these parts of parameters."""
    for param, first, span in ranges:
        shard = get_shard(param)
        assert shard is not None
        last = first + span.stop - span.start
        for elements, ranks, is_first_copy in shard.shared_elements():
            start, stop = max(first, elements.start), min(last, elements.stop)
            if start < stop:
                offset = span.start + start - first
                yield slice(offset, offset + stop - start), ranks, is_first_copy
