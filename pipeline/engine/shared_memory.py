"""Collectives between processes of one machine, through memory that all of them map.

A process copies a chunk of its vector into its own slot of a shared file. After a barrier, which
also compares what the processes have done so far, the others read it from there. Two sets of slots
take turns: a process that reaches the next barrier has read the set before, so one barrier per
chunk is enough. Sums are trees in rank order.
"""

import mmap
import os
import time

import torch
from torch import Tensor

from pipeline.engine.comm import Finished, GroupCollectives, Work, tree_sum
from pipeline.parallel.group import Group

SLOT_BYTES = 8 * 2**20


class SharedMemoryCollectives(GroupCollectives):
    """All-gather and reduce-scatter through shared memory, the rest through the process group."""

    def __init__(self, name: str, group: Group) -> None:
        super().__init__(torch.device("cpu"), name, group, deterministic=True)
        self.asynchronous = False
        self._slots = _map(group, 2 * group.size * SLOT_BYTES).view(2, group.size, SLOT_BYTES)
        self._turn = 0

    def _post(self, chunk: Tensor) -> list[Tensor]:
        """Write a chunk to this process's slot, and return every process's chunk."""
        self._turn ^= 1
        slots = [
            slot[: chunk.numel() * chunk.element_size()].view(chunk.dtype).view(chunk.shape)
            for slot in self._slots[self._turn]
        ]
        slots[self.rank].copy_(chunk)
        self._all_reduce(torch.empty(0, dtype=torch.float64))  # a barrier, which compares histories
        return slots

    def _all_gather(self, full: Tensor, shard: Tensor, unit: str) -> Work:  # noqa: ARG002
        pieces = full.view(self.size, -1)
        step = SLOT_BYTES // full.element_size()
        for start in range(0, pieces.shape[1], step):
            columns = pieces[:, start : start + step]
            for rank, chunk in enumerate(self._post(columns[self.rank])):
                if rank != self.rank:
                    columns[rank].copy_(chunk)
        return Finished()

    def _reduce_scatter(self, full: Tensor, out: Tensor, unit: str) -> Work:  # noqa: ARG002
        pieces = full.view(self.size, -1)
        step = SLOT_BYTES // full.element_size() // self.size
        for start in range(0, pieces.shape[1], step):
            chunks = self._post(pieces[:, start : start + step])
            parts = [chunk[self.rank] for chunk in chunks]
            tree_sum(parts, out=out[start : start + step])
        return Finished()


def on_one_machine(group: Group) -> bool:
    """True if every process can map the memory of the others; all processes call it."""
    token = f"{os.getpid()}-{time.time_ns()}".encode()
    fd = _create(mmap.PAGESIZE)
    os.pwrite(fd, token, 0)
    readable = True
    for pid, other_fd, expected in group.gather_objects((os.getpid(), fd, token)):
        try:
            page = os.open(f"/proc/{pid}/fd/{other_fd}", os.O_RDWR | os.O_CLOEXEC)
            readable = readable and os.pread(page, len(expected), 0) == expected
            os.close(page)
        except OSError:
            readable = False
    readable = all(group.gather_objects(readable))
    os.close(fd)
    return readable


def _map(group: Group, num_bytes: int) -> Tensor:
    """Memory that all processes of the group map; it is freed with the last of them."""
    fd = _create(num_bytes) if group.rank == 0 else -1
    pid, first_fd = group.gather_objects((os.getpid(), fd))[0]
    if group.rank > 0:
        fd = os.open(f"/proc/{pid}/fd/{first_fd}", os.O_RDWR | os.O_CLOEXEC)
    mapped = mmap.mmap(fd, num_bytes)
    group.barrier()
    os.close(fd)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _create(num_bytes: int) -> int:
    fd = os.memfd_create("engine", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd
