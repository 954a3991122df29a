"""Collectives on flat vectors, and the buffers that they read and write.

Every vector has one equal shard per rank. Where this package itself computes a sum over ranks, it
adds in a binary tree in rank order, so that the bits depend only on the addends.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.kernels.pinned_memory import pinned_empty
from pipeline.parallel.group import Group, all_gather, reduce_scatter
from pipeline.system.position import POSITION

SUM_BLOCK = 65536
"""Number of elements converted to fp32 and added at once: they fit in a core's cache."""


@runtime_checkable
class Work(Protocol):
    """A pending collective."""

    def wait(self) -> object:
        """Wait until the result may be used."""


@dataclass(frozen=True)
class CompletedWork:
    """A completed collective."""

    def wait(self) -> None:
        """Return immediately: nothing is pending."""


@dataclass
class ChainedWork:
    """A pending collective or copy, followed by one more operation."""

    work: Work
    finish: Callable[[], object]
    done: bool = field(default=False, init=False)

    def wait(self) -> None:
        """Wait until the second operation is done."""
        if not self.done:
            self.work.wait()
            self.finish()
            self.done = True


class Collectives:
    """Collectives of a single process; base class of collectives over several processes."""

    def __init__(self, device: torch.device, name: str, group: Group) -> None:
        self.group = group
        self.rank, self.size = group.rank, group.size
        self.owner = name
        """Name of the engine, for messages."""
        on_gpu = device.type == "cuda"
        self.gathers_ahead = on_gpu
        """Whether to gather the next weights during computation, which on CPUs uses its cores."""
        self._copy_stream = torch.cuda.Stream(device) if on_gpu else None

    def enter(self, kind: str, unit: str, num_bytes: int) -> None:
        """Record that this process enters a collective of a unit."""
        POSITION.enter_collective(kind, f"{unit} ({self.owner})" if unit else self.owner, num_bytes)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for a vector, pinned if it is offloaded from a GPU."""
        if self._copy_stream is not None and device.type == "cpu":
            return pinned_empty(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=device)

    def local_shard(self, full: Tensor) -> Tensor:
        """Return this process's shard of a vector."""
        size = full.numel() // self.size
        return full[self.rank * size : (self.rank + 1) * size]

    def all_gather(self, full: Tensor, shard: Tensor, unit: str) -> Work:
        """Fill `full` with the shards of all processes, in rank order.

        `shard` is a separate vector allocated by `empty`, or this process's shard of `full`.
        """
        self.enter("all_gather", unit, full.nbytes)
        local = self.local_shard(full)
        if self._copy_stream is not None and shard.device != full.device:
            return self._gather_from_host(full, shard, unit)
        if local.data_ptr() != shard.data_ptr():
            local.copy_(shard)
        return self._all_gather(full, shard, unit)

    def _gather_from_host(self, full: Tensor, shard: Tensor, unit: str) -> Work:
        """Copy the shard to the GPU on a side stream, then gather.

        `full` is allocated and freed on the compute stream, so the copy waits for earlier work
        on that stream, and the stream in turn waits for the copy.
        """
        assert self._copy_stream is not None
        self._copy_stream.wait_stream(torch.cuda.current_stream(full.device))
        with torch.cuda.stream(self._copy_stream):
            self.local_shard(full).copy_(shard, non_blocking=True)
            work = self._all_gather(full, shard, unit)
            return ChainedWork(self._copy_stream.record_event(), work.wait)

    def reduce_scatter(self, full: Tensor, out: Tensor, unit: str) -> Work:
        """Sum `full` over processes, and write this process's shard of the sum to `out`.

        `full` is allocated by `empty` and is undefined afterwards; `out` may be its local shard.
        """
        dtype = self.reduce_dtype or full.dtype
        self.enter("reduce_scatter", unit, full.numel() * dtype.itemsize)
        return self._reduce_scatter(full, out, unit)

    def all_reduce(self, values: Tensor) -> None:
        """Sum a few float64 values over processes, in place.

        The result is exact, and thus independent of the order, if each value is nonzero on one
        process only.
        """
        self.enter("all_reduce", "", values.nbytes)
        self._all_reduce(values)

    def synchronize(self) -> None:
        """Wait for pending copies from host memory to the GPU."""
        if self._copy_stream is not None:
            self._copy_stream.synchronize()

    reduce_dtype: torch.dtype | None = None
    """The dtype in which `reduce_scatter` sends vectors; None for the vectors' own dtype."""

    copy_index, num_copies = 0, 1
    """Index of this process's sharded copy of the model, and the number of copies."""

    def end_step(self) -> None:
        """Release memory that only an optimizer step needs."""

    def _all_gather(self, full: Tensor, shard: Tensor, unit: str) -> Work:  # noqa: ARG002
        return CompletedWork()

    def _reduce_scatter(self, full: Tensor, out: Tensor, unit: str) -> Work:  # noqa: ARG002
        tree_sum([full], out=out)
        return CompletedWork()

    def _all_reduce(self, values: Tensor) -> None:
        pass


class GroupCollectives(Collectives):
    """Collectives through PyTorch's process group, with NCCL or gloo."""

    def __init__(
        self,
        device: torch.device,
        name: str,
        group: Group,
        *,
        deterministic: bool,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(device, name, group)
        self.reduce_dtype = reduce_dtype
        # gloo's reduce-scatter is several times slower than an all-to-all and a local sum.
        self.uses_all_to_all = deterministic or dist.get_backend(group.process_group) == "gloo"

    def _all_gather(self, full: Tensor, shard: Tensor, unit: str) -> Work:  # noqa: ARG002
        work = all_gather(full, self.local_shard(full), self.group.process_group)
        return GroupWork(work, self.group)

    def _reduce_scatter(self, full: Tensor, out: Tensor, unit: str) -> Work:  # noqa: ARG002
        if self.reduce_dtype is not None:
            full = full.to(self.reduce_dtype)
        if not self.uses_all_to_all:
            target = out if out.dtype == full.dtype else torch.empty_like(out, dtype=full.dtype)
            work = reduce_scatter(target, full, self.group.process_group)
            work = GroupWork(work, self.group)
            return work if target is out else ChainedWork(work, partial(out.copy_, target))
        received = torch.empty_like(full)
        work = dist.all_to_all_single(received, full, group=self.group.process_group, async_op=True)
        assert work is not None
        summed = partial(tree_sum, received.chunk(self.size), out=out)
        return ChainedWork(GroupWork(work, self.group), summed)

    def _all_reduce(self, values: Tensor) -> None:
        """Sum the values, together with fingerprints of the processes' histories."""
        packed = self.group.append_fingerprints(values)
        work = dist.all_reduce(packed, group=self.group.process_group, async_op=True)
        assert work is not None
        GroupWork(work, self.group).wait()
        values.copy_(self.group.check_fingerprints(packed))


@dataclass(frozen=True)
class GroupWork:
    """A pending collective that reports to the watchdog which processes it waits for."""

    work: Work
    group: Group

    def wait(self) -> None:
        """Wait until the result may be used; on a GPU, make the compute stream wait."""
        with POSITION.waiting(self.group.other_ranks):
            self.work.wait()


def tree_sum(parts: Sequence[Tensor], *, out: Tensor) -> None:
    """Add the parts in a binary tree: adjacent parts first, then adjacent sums, and so on.

    If the number of parts is a power of two, the sums of the two halves are added last, so the
    result is the same if two processes each sum one half first. `out` may be one of the parts; the
    other parts are not modified. Parts are converted to the dtype of `out` before they are added.
    """
    if any(part.dtype != out.dtype for part in parts):
        blocks = zip(*(part.split(SUM_BLOCK) for part in (out, *parts)), strict=True)
        for block, *part_blocks in blocks:
            tree_sum([part.to(block.dtype) for part in part_blocks], out=block)
        return
    level = list(parts)
    while len(level) > 2:
        pairs = [first + second for first, second in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(level) - len(level) % 2 :]
    if len(level) == 2:
        torch.add(level[0], level[1], out=out)
    elif level[0].data_ptr() != out.data_ptr():
        out.copy_(level[0])


MAX_PENDING_COPIES = 2
"""Maximum number of gradients in transfer: one is copied while the next is computed."""


class GradientCopies:
    """Copies of gradients from a GPU to host memory, at most `MAX_PENDING_COPIES` at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pending: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def start(self, gradient: Tensor, work: Callable[[], object]) -> torch.cuda.Event:
        """Run `work`, which reads `gradient`, on the side stream, and record and return an event.

        If too many copies are pending, the compute stream, not the host, waits for the oldest.
        """
        computing = torch.cuda.current_stream()
        while len(self._pending) >= MAX_PENDING_COPIES:
            computing.wait_event(self._pending.popleft()[0])
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            work()
            event = torch.cuda.Event()
            event.record()
        self._pending.append((event, gradient))
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """Block the host until `event` completes; release the gradients that have been copied."""
        event.synchronize()
        while self._pending and self._pending[0][0].query():
            self._pending.popleft()


class BufferPool:
    """Reusable flat buffers. All processes must acquire and release them in the same order."""

    def __init__(self, comm: Collectives, device: torch.device) -> None:
        self.comm = comm
        self.device = device
        self.copies = GradientCopies(device) if device.type == "cuda" else None
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._read_events: dict[int, torch.cuda.Event] = {}
        """CUDA events by buffer address; after its event, a free buffer is no longer being read."""

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized buffer."""
        free = self._free.setdefault((numel, dtype), [])
        buffer = free.pop(0) if free else self.comm.empty(numel, dtype, self.device)
        read = self._read_events.pop(buffer.data_ptr(), None)
        if read is not None:
            torch.cuda.current_stream().wait_event(read)
        return buffer

    def release(self, buffer: Tensor, *, after: torch.cuda.Event | None = None) -> None:
        """Return the buffer to the pool, to be reused after the event `after`."""
        if after is not None:
            self._read_events[buffer.data_ptr()] = after
        self._free[buffer.numel(), buffer.dtype].append(buffer)

    def free_unused(self) -> None:
        """Free the memory of all buffers that are not in use."""
        self._free = {kind: [] for kind in self._free}
        self._read_events.clear()
