"""Collectives over sharded copies of a model, and the collectives of an engine."""

from collections import Counter
from functools import partial

import torch
from torch import Tensor

from pipeline.config.model import ZeroConfig
from pipeline.engine.comm.collectives import (
    BufferPool,
    ChainedWork,
    Collectives,
    GroupCollectives,
    Work,
)
from pipeline.parallel.group import DataGroup, Group
from pipeline.system.position import SAME_ORDER, DesyncError


class CollectivesOverCopies(Collectives):
    """Collectives that gather within a copy of the model, and sum over all copies."""

    def __init__(self, device: torch.device, within: Collectives, across: Collectives) -> None:
        super().__init__(device, within.owner, within.group)
        self.copy_index, self.num_copies = across.rank, across.size
        self._within_copy, self._across_copies = within, across
        self._pool = BufferPool(across, device)

    def all_gather(self, full: Tensor, shard: Tensor, unit: str) -> Work:
        """Fill `full` with the shards of this copy's processes."""
        return self._within_copy.all_gather(full, shard, unit)

    def reduce_scatter(self, full: Tensor, out: Tensor, unit: str) -> Work:
        """Sum `full` over all processes, and write the local shard of the sum to `out`, in fp32."""
        work = self._within_copy.reduce_scatter(full, out, unit)
        return ChainedWork(work, partial(self.all_reduce_copies, out, unit))

    def all_reduce_copies(self, shard: Tensor, unit: str) -> None:
        """Sum a shard over the copies, in place: reduce-scatter, then all-gather."""
        padded = -(-shard.numel() // self.num_copies) * self.num_copies
        buffer = self._pool.acquire(padded, shard.dtype)
        buffer[: shard.numel()].copy_(shard)
        buffer[shard.numel() :].zero_()
        local = self._across_copies.local_shard(buffer)
        self._across_copies.reduce_scatter(buffer, local, unit).wait()
        self._across_copies.all_gather(buffer, local, unit).wait()
        shard.copy_(buffer[: shard.numel()])
        self._pool.release(buffer)

    def all_reduce(self, values: Tensor) -> None:
        """Sum a few float64 values over all processes, in place."""
        self._within_copy.all_reduce(values)
        self._across_copies.all_reduce(values)

    def synchronize(self) -> None:
        """Wait for pending copies from host memory to the GPU."""
        self._within_copy.synchronize()

    def end_step(self) -> None:
        """Release the memory in which shards were summed."""
        self._pool.free_unused()


_NAME_COUNTS = Counter[str]()
"""Number of engines of this process by name."""


def make_collectives(
    device: torch.device, zero: ZeroConfig, group: Group, *, name: str
) -> Collectives:
    """Return the collectives of an engine over a group, whose processes must all call this.

    A second engine with the same name gets a number, so that names are unique.

    Raises:
        DesyncError: the processes build different engines.
    """
    if isinstance(group, DataGroup):
        within = make_collectives(device, zero, group.shards, name=name)
        across = make_collectives(device, zero, group.copies, name=f"{name}, over its copies")
        return CollectivesOverCopies(device, within, across)
    name = _make_unique(name, group)
    if group.size == 1:
        return Collectives(device, name, group)
    deterministic = zero.reduction == "deterministic"
    dtype = torch.bfloat16 if zero.reduce_dtype == "bf16" else None
    return GroupCollectives(device, name, group, deterministic=deterministic, reduce_dtype=dtype)


def _make_unique(name: str, group: Group) -> str:
    names = group.gather_objects((name, _NAME_COUNTS[name] + 1))
    for other, (other_name, _) in zip(group.ranks, names, strict=True):
        if other_name != names[0][0]:
            raise DesyncError(
                f"rank {group.ranks[0]} builds the engine {names[0][0]!r} while rank {other} builds"
                f" {other_name!r}; {SAME_ORDER}"
            )
    _NAME_COUNTS[name] = number = max(count for _, count in names)
    return name if number == 1 else f"{name} {number}"
