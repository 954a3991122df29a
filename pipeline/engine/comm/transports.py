"""Collectives over shared memory and over sharded copies, and the choice between them.

Shared memory: a process copies a chunk of its vector into its slot of a shared file. After a
barrier, which also compares the processes' histories, the others read the slot. Two sets of
slots alternate: a process that reaches the next barrier has read the previous set, so one barrier
per chunk is enough. Sums are trees in rank order.
"""

import mmap
import os
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pipeline.config.model import ZeroConfig
from pipeline.engine.comm.collectives import (
    BufferPool,
    ChainedWork,
    Collectives,
    CompletedWork,
    GroupCollectives,
    Work,
    tree_sum,
)
from pipeline.parallel.group import DataGroup, Group
from pipeline.system.position import SAME_ORDER, DesyncError

SLOT_BYTES = 8 * 2**20


class SharedMemoryCollectives(GroupCollectives):
    """All-gather and reduce-scatter over shared memory; other collectives use the process group."""

    def __init__(self, name: str, group: Group) -> None:
        super().__init__(torch.device("cpu"), name, group, deterministic=True)
        self.asynchronous = False
        memory = _map_shared(group, 2 * group.size * SLOT_BYTES)
        self._slots = memory.view(2, group.size, SLOT_BYTES)
        self._current = 0

    def _exchange(self, chunk: Tensor) -> list[Tensor]:
        """Write a chunk to this process's slot and return every process's chunk."""
        self._current ^= 1
        slots = [
            slot[: chunk.numel() * chunk.element_size()].view(chunk.dtype).view(chunk.shape)
            for slot in self._slots[self._current]
        ]
        slots[self.rank].copy_(chunk)
        self._all_reduce(torch.empty(0, dtype=torch.float64))  # a barrier; also compares histories
        return slots

    def _all_gather(self, full: Tensor, shard: Tensor, unit: str) -> Work:  # noqa: ARG002
        by_rank = full.view(self.size, -1)
        step = SLOT_BYTES // full.element_size()
        for start in range(0, by_rank.shape[1], step):
            columns = by_rank[:, start : start + step]
            for rank, chunk in enumerate(self._exchange(columns[self.rank])):
                if rank != self.rank:
                    columns[rank].copy_(chunk)
        return CompletedWork()

    def _reduce_scatter(self, full: Tensor, out: Tensor, unit: str) -> Work:  # noqa: ARG002
        by_rank = full.view(self.size, -1)
        step = SLOT_BYTES // full.element_size() // self.size
        for start in range(0, by_rank.shape[1], step):
            chunks = self._exchange(by_rank[:, start : start + step])
            parts = [chunk[self.rank] for chunk in chunks]
            tree_sum(parts, out=out[start : start + step])
        return CompletedWork()


def can_share_memory(group: Group) -> bool:
    """Return whether processes can map each other's memory; all processes must call this."""
    if not hasattr(os, "memfd_create"):  # only Linux has it
        return False
    token = f"{os.getpid()}-{time.time_ns()}".encode()
    fd = _create_memfd(mmap.PAGESIZE)
    os.pwrite(fd, token, 0)
    readable = True
    for pid, other_fd, expected in group.gather_objects((os.getpid(), fd, token)):
        try:
            with Path(f"/proc/{pid}/fd/{other_fd}").open("r+b") as page:
                readable = readable and page.read(len(expected)) == expected
        except OSError:
            readable = False
    readable = all(group.gather_objects(readable))
    os.close(fd)
    return readable


def _map_shared(group: Group, num_bytes: int) -> Tensor:
    """Map memory shared by the processes of a group; it is freed when the last of them exits."""
    fd = _create_memfd(num_bytes) if group.rank == 0 else -1
    pid, first_fd = group.gather_objects((os.getpid(), fd))[0]
    if group.rank > 0:
        fd = os.open(f"/proc/{pid}/fd/{first_fd}", os.O_RDWR | os.O_CLOEXEC)
    mapped = mmap.mmap(fd, num_bytes)
    group.barrier()
    os.close(fd)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _create_memfd(num_bytes: int) -> int:
    fd = os.memfd_create("engine", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd


class CollectivesOverCopies(Collectives):
    """Collectives that gather within a copy of the model, and sum over all copies."""

    def __init__(self, device: torch.device, within: Collectives, across: Collectives) -> None:
        super().__init__(device, within.owner, within.group)
        self.copy_index, self.num_copies = across.rank, across.size
        self.asynchronous = within.asynchronous
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
    """Choose the fastest transport between a group's processes, which must all call this.

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
    if device.type == "cpu" and zero.shared_memory and can_share_memory(group):
        return SharedMemoryCollectives(name, group)
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
