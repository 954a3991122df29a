"""Parameters of tensor-parallel layers: the shards of each process, and their gradients.

Some parameters are sharded, others are replicated. For a replicated parameter each process computes
the full gradient, or a partial sum if the parameter is only used with the process's heads. The role
of a parameter decides how its gradient is reduced, once per optimizer step and in fp32, so that
each element counts once in the norm and in a checkpoint.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pipeline.parallel.device import local_device
from pipeline.parallel.group import Group, tree_sum
from pipeline.parallel.shards import Shard, ShardSpec

Role = Literal["whole", "partial", "part", "shared"]
"""whole: every process has all of it and its full gradient; partial: every process has all of it,
and a partial gradient; part: has elements that no other process has; shared: other processes also
have some of them."""


_PART, _IS_PARTIAL = "tensor_parallel_part", "is_partial"
"""Names of attributes set on a parameter, which is the same object in the model and its engine."""


@dataclass(frozen=True)
class Part:
    """A sharded parameter, of which this process has a part."""

    whole: torch.Size
    """Shape of the full parameter."""

    specs: tuple[ShardSpec, ...]
    """The shards of each process of the group, in rank order."""

    rank: int
    """Rank of this process in the group."""

    stored: torch.Size | None = None
    """Shape in which the full parameter is stored, if it differs from `whole`."""

    @property
    def own(self) -> ShardSpec:
        """The shards of this process."""
        return self.specs[self.rank]

    @property
    def role(self) -> Role:
        """The role: `shared` if other processes also have some elements, else `part`."""
        return "shared" if any(each.copies > 1 for each in self.own.shards) else "part"

    @property
    def inner(self) -> int:
        """Number of elements in the full parameter per index of the sharded dimension."""
        return self.whole[self.own.dim + 1 :].numel()

    def in_blocks(self, block: int) -> "Part | None":
        """The same part in units of `block` consecutive elements, numbered by row.

        None if a block would be split between processes.
        """
        rows, inner = self.whole[: self.own.dim].numel(), self.inner
        stride = self.whole[self.own.dim] * inner
        ends = [(each.start, each.stop) for spec in self.specs for each in spec.shards]
        whole = all(
            first * inner % block == 0 and (last * inner % block == 0 or last * inner == stride)
            for first, last in ends
        )
        if not whole or (rows > 1 and stride % block):
            return None

        def scaled(shard: Shard) -> Shard:
            stop = -(-shard.stop * inner // block)
            return replace(shard, start=shard.start * inner // block, stop=stop)

        specs = tuple(ShardSpec(1, tuple(map(scaled, each.shards))) for each in self.specs)
        return Part(torch.Size((rows, -(-stride // block))), specs, self.rank)

    def joined(self, parts: list[Tensor]) -> Tensor:
        """The full parameter, concatenated from the parts of all processes."""
        whole = parts[0].new_empty(self.whole)
        for spec, part in zip(self.specs, parts, strict=True):
            spec.put(part.view(spec.shape(self.whole)), whole)
        return whole

    def shared_elements(self) -> Iterator[tuple[slice, list[int], bool]]:
        """Shared ranges of the flattened part, the ranks with each, and if this is the first."""
        assert self.own.dim == 0
        inner = self.inner
        for shard, begin in self.own.placed():
            if shard.copies > 1:
                first = self.rank - self.rank % shard.copies
                holders = list(range(first, first + shard.copies))
                yield slice(begin * inner, (begin + shard.size) * inner), holders, shard.counts


def replace_by_part(layer: nn.Module, leaf: str, part: Part) -> None:
    """Replace a layer's parameter with this process's part; a flat one stays flat."""
    param = layer.get_parameter(leaf)
    own = part.own.of(param.detach().view(part.whole))
    own = own.clone(memory_format=torch.contiguous_format)
    replaced = nn.Parameter(own if part.stored is None else own.view(-1), param.requires_grad)
    mark_part(replaced, part)
    setattr(layer, leaf, replaced)


def mark_part(param: Tensor, part: Part) -> None:
    """Mark a parameter as a part of a full one."""
    setattr(param, _PART, part)


def mark_partial(param: Tensor) -> None:
    """Mark a parameter for which each process computes a partial gradient."""
    setattr(param, _IS_PARTIAL, True)


def get_part(param: Tensor) -> Part | None:
    """The part that this parameter is of a full one; None if it is full itself."""
    return getattr(param, _PART, None)


def get_role(param: Tensor) -> Role:
    """The role of a parameter; a frozen one is `part` or `whole`."""
    part = get_part(param)
    if part is not None:
        return part.role
    is_partial = getattr(param, _IS_PARTIAL, False)
    return "partial" if is_partial and param.requires_grad else "whole"


def whole_shape(param: Tensor) -> torch.Size:
    """Shape of the full parameter; its own shape if it is not sharded."""
    part = get_part(param)
    return param.shape if part is None else part.stored or part.whole


Stretch = tuple[Tensor, int, slice]
"""A parameter, the index of its first element, and its range in a vector."""


def completed(
    gradient: Float[Tensor, " n"], role: Role, group: Group, stretches: list[Stretch]
) -> Float[Tensor, " n"]:
    """Complete a gradient by summing it with those of other processes for the same elements.

    A collective. Sums are trees in rank order, with the same bits on all processes.
    """
    if group.size == 1 or role in ("whole", "part"):
        return gradient
    on_device = gradient.to(local_device())  # it may be offloaded
    parts = group.gather(on_device, what="gradients of shared weights")
    parts = [each.to(gradient.device) for each in parts]
    if role == "partial":
        return tree_sum(parts)
    own = gradient.clone()
    for place, holders, _ in _shared(stretches):
        own[place] = tree_sum([parts[each][place] for each in holders])
    return own


def counted(
    gradient: Float[Tensor, " n"], role: Role, group: Group, stretches: list[Stretch]
) -> Float[Tensor, " n"]:
    """The gradient, with zeros for the elements that another process adds to the norm."""
    if group.size == 1 or role == "part":
        return gradient
    if role in ("whole", "partial"):
        return gradient if group.rank == 0 else torch.zeros_like(gradient)
    own = gradient.clone()
    for place, _, counts in _shared(stretches):
        if not counts:
            own[place] = 0
    return own


def _shared(stretches: list[Stretch]) -> Iterator[tuple[slice, list[int], bool]]:
    """Ranges of a vector that other processes also have."""
    for param, first, place in stretches:
        part = get_part(param)
        assert part is not None
        last = first + place.stop - place.start
        for elements, holders, counts in part.shared_elements():
            start, stop = max(first, elements.start), min(last, elements.stop)
            if start < stop:
                at = place.start + start - first
                yield slice(at, at + stop - start), holders, counts
