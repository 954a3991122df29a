"""Memory of a process that the others of its machine map, and read without a copy through a socket.

It lies in files that live in memory alone. A process opens those of another one by its descriptors;
whether it may, `on_one_machine` finds out.
"""

import mmap
import os
import platform
import time
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.parallel.group import Group
from pipeline.parallel.rendezvous import ControlBlock, close_all

CHUNK_BYTES = 64 * 2**20
"""Address space, not memory: a page costs nothing until it is written."""

CACHE_LINE = 64
RELEASED_BYTES = 2**16
"""Vectors from this size on have pages of their own, which can be given back."""


@dataclass(frozen=True)
class _Chunk:
    """A piece of shared memory."""

    mapped: mmap.mmap
    bytes: Tensor


class SharedMemory:
    """Memory that grows by chunks, in step on all processes, and is never given back.

    What lies at some place of some chunk here has its counterpart at the same place elsewhere.
    """

    def __init__(self, group: Group) -> None:
        self.rank = group.rank
        self._chunks: list[_Chunk] = []
        self._used = 0
        self._mapped: dict[tuple[int, int], Tensor] = {}
        self.pids: list[int] = group.gather_objects(os.getpid())
        self.table = _map_table(self.pids[0], group)
        fds: list[int] = []
        self._fds = fds
        weakref.finalize(self, close_all, fds)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A vector of `numel` elements, zero at first."""
        num_bytes = numel * dtype.itemsize
        alignment = mmap.PAGESIZE if num_bytes >= RELEASED_BYTES else CACHE_LINE
        self._used = -(-self._used // alignment) * alignment
        if not self._chunks or self._used + num_bytes > len(self._chunks[-1].bytes) - mmap.PAGESIZE:
            self._grow(max(num_bytes + mmap.PAGESIZE, CHUNK_BYTES))
        start = self._used
        self._used += -(-num_bytes // alignment) * alignment
        return self._chunks[-1].bytes[start : start + num_bytes].view(dtype)

    def release(self, own: Tensor) -> bool:
        """Punch a hole where a vector of whole pages lies."""
        if own.nbytes < RELEASED_BYTES:
            return False
        chunk = self._chunks[self._index_of(own)]
        start = own.data_ptr() - chunk.bytes.data_ptr()
        pages = -(-own.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        chunk.mapped.madvise(mmap.MADV_REMOVE, start, pages)
        return True

    def _index_of(self, own: Tensor) -> int:
        base = own.untyped_storage().data_ptr()
        return next(n for n, each in enumerate(self._chunks) if each.bytes.data_ptr() == base)

    def of_rank(
        self, other: int, own: Tensor, *, shift: int = 0, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The counterpart of our vector `own` in another process, `shift` elements further.

        It begins at the same place; there its elements may be of another `dtype`.
        """
        theirs = own.dtype if dtype is None else dtype
        index = self._index_of(own)
        start = own.data_ptr() - self._chunks[index].bytes.data_ptr() + shift * own.element_size()
        stop = start + own.numel() * theirs.itemsize
        return self._chunk_of(other, index)[start:stop].view(theirs)

    def _chunk_of(self, other: int, index: int) -> Tensor:
        if other == self.rank:
            return self._chunks[index].bytes
        if (other, index) not in self._mapped:
            fd = self.table.fd_of(other, index)
            size = len(self._chunks[index].bytes)
            opened = _open(self.pids[other], fd)
            self._mapped[other, index] = torch.frombuffer(
                mmap.mmap(opened, size), dtype=torch.uint8
            )
            os.close(opened)
        return self._mapped[other, index]

    def _grow(self, num_bytes: int) -> None:
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = _create(size)
        self._fds.append(fd)
        self.table.publish(self.rank, len(self._chunks), fd)
        mapped = mmap.mmap(fd, size)
        self._chunks.append(_Chunk(mapped, torch.frombuffer(mapped, dtype=torch.uint8)))
        self._used = 0


def on_one_machine(group: Group) -> bool:
    """Whether every process can map the memory of the others; all of the group call it."""
    return all(group.gather_objects(_can_map(group)))


def _can_map(group: Group) -> bool:
    """Collective: every process offers a page, and tries to read the others'."""
    able = (
        hasattr(os, "memfd_create")
        and hasattr(os, "pidfd_open")
        and platform.machine() in ("x86_64", "AMD64")
    )
    fd = _create(mmap.PAGESIZE) if able else -1
    token = f"{os.getpid()}-{time.time_ns()}".encode()
    if able:
        os.pwrite(fd, token, 0)
    offers = group.gather_objects((os.getpid(), fd, token))
    seen = able
    for pid, theirs, expected in offers:
        try:
            page = _open(pid, theirs)
            seen = seen and os.pread(page, len(expected), 0) == expected
            os.close(page)
        except OSError:
            seen = False
    dist.barrier(group=group.process_group)
    if able:
        os.close(fd)
    return seen


def _map_table(first_pid: int, group: Group) -> ControlBlock:
    size = ControlBlock.size(group.size)
    fd = _create(size) if group.rank == 0 else -1
    theirs = group.gather_objects(fd)[0]
    opened = fd if group.rank == 0 else _open(first_pid, theirs)
    mapped = mmap.mmap(opened, size)
    dist.barrier(group=group.process_group)
    os.close(opened)
    return ControlBlock(mapped, group)


def _create(num_bytes: int) -> int:
    fd = os.memfd_create("engine", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd


def _open(pid: int, fd: int) -> int:
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
