"""A process's part of a tensor that is sharded along a dimension."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """Elements of a dimension, from `start` up to `stop` (exclusive)."""

    start: int
    stop: int

    copies: int = 1
    """Number of processes, adjacent in rank, with the same elements."""

    counts: bool = True
    """False if a lower-ranked process has the same elements."""

    @property
    def size(self) -> int:
        """Number of elements along the dimension."""
        return self.stop - self.start


@dataclass(frozen=True)
class ShardSpec:
    """The part of a weight that a process has: shards of one dimension."""

    dim: int
    shards: tuple[Shard, ...]

    zero: bool = False
    """Whether the process has zeros instead of the part."""

    def of(self, whole: Tensor) -> Tensor:
        """The part, taken from the full weight."""
        if self.zero:
            return torch.zeros_like(whole)
        parts = [whole.narrow(self.dim, each.start, each.size) for each in self.shards]
        return torch.cat(parts, dim=self.dim) if len(parts) > 1 else parts[0]

    def shape(self, whole: torch.Size) -> torch.Size:
        """The shape of the part."""
        sizes = list(whole)
        sizes[self.dim] = sum(self._sizes())
        return torch.Size(sizes)

    def first_held(self, part: Tensor) -> list[tuple[Tensor, int]]:
        """Return the elements that no lower-ranked process has, with their offset in a full row."""
        shards = zip(part.split(self._sizes(), dim=self.dim), self.shards, strict=True)
        in_rows = self.dim == part.ndim - 1
        return [(each, in_rows * shard.start) for each, shard in shards if shard.counts]

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Write a process's part to the full weight."""
        for own, shard in zip(part.split(self._sizes(), dim=self.dim), self.shards, strict=True):
            whole.narrow(self.dim, shard.start, shard.size).copy_(own)

    def placed(self) -> Iterator[tuple[Shard, int]]:
        """Each shard with its offset in the part."""
        begin = 0
        for shard in self.shards:
            yield shard, begin
            begin += shard.size

    def _sizes(self) -> list[int]:
        return [each.size for each in self.shards]
