"""A process's shard of a tensor, along one dimension."""

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

    is_first_copy: bool = True
    """False if a lower-ranked process has the same elements."""

    @property
    def size(self) -> int:
        """Number of elements along the dimension."""
        return self.stop - self.start


@dataclass(frozen=True)
class ShardSpec:
    """A process's shard of a weight: one or more ranges of a dimension."""

    dim: int
    shards: tuple[Shard, ...]

    zero: bool = False
    """Whether the process has zeros instead of the weight."""

    def extract(self, full: Tensor) -> Tensor:
        """Return the shard of a full weight."""
        if self.zero:
            return torch.zeros_like(full)
        parts = [full.narrow(self.dim, shard.start, shard.size) for shard in self.shards]
        return torch.cat(parts, dim=self.dim) if len(parts) > 1 else parts[0]

    def shape(self, full_shape: torch.Size) -> torch.Size:
        """Return the shape of this shard, given the shape of the full weight."""
        sizes = list(full_shape)
        sizes[self.dim] = sum(self._sizes())
        return torch.Size(sizes)

    def first_copies(self, local: Tensor) -> list[tuple[Tensor, int]]:
        """Return the elements that no lower-ranked process has, with their offset in a full row."""
        shards = zip(local.split(self._sizes(), dim=self.dim), self.shards, strict=True)
        in_rows = self.dim == local.ndim - 1
        return [(values, in_rows * s.start) for values, s in shards if s.is_first_copy]

    def insert(self, local: Tensor, full: Tensor) -> None:
        """Write the shard to the full weight."""
        for values, shard in zip(
            local.split(self._sizes(), dim=self.dim), self.shards, strict=True
        ):
            full.narrow(self.dim, shard.start, shard.size).copy_(values)

    def with_offsets(self) -> Iterator[tuple[Shard, int]]:
        """Yield each range with its offset in the shard."""
        begin = 0
        for shard in self.shards:
            yield shard, begin
            begin += shard.size

    def _sizes(self) -> list[int]:
        return [shard.size for shard in self.shards]
