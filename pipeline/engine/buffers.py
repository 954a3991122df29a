"""Gradient buffers that are used again, and copies of gradients on a side stream of a GPU."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.engine.comm import Collectives

AT_ONCE = 2
"""Gradients in transfer to main memory: one is copied while the next is computed."""


class GradientCopies:
    """Copies of gradients from a GPU to main memory, at most `AT_ONCE` of an engine."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pending: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def start(self, gradient: Tensor, work: Callable[[], object]) -> torch.cuda.Event:
        """Run `work`, which reads `gradient`, on the side stream; the event after it.

        If too many copies are pending, the computing stream waits for the oldest, not the host.
        """
        computing = torch.cuda.current_stream()
        while len(self._pending) >= AT_ONCE:
            computing.wait_event(self._pending.popleft()[0])
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            work()
            event = torch.cuda.Event()
            event.record()
        self._pending.append((event, gradient))
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """Block the host until `event`, and release the gradients that have been copied."""
        event.synchronize()
        while self._pending and self._pending[0][0].query():
            self._pending.popleft()


class BufferPool:
    """Flat buffers by size and dtype. All processes borrow and give back in the same order."""

    def __init__(self, comm: Collectives, device: torch.device) -> None:
        self.comm = comm
        self.device = device
        self.copies = GradientCopies(device) if device.type == "cuda" else None
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._read: dict[int, torch.cuda.Event] = {}
        """By address: the moment after which a free buffer has been read."""

    def borrow(self, numel: int, dtype: torch.dtype, *, zero: bool = False) -> Tensor:
        """A buffer of zeros, or of undefined content."""
        free = self._free.setdefault((numel, dtype), [])
        buffer = free.pop(0) if free else self.comm.empty(numel, dtype, self.device)
        read = self._read.pop(buffer.data_ptr(), None)
        if read is not None:
            torch.cuda.current_stream().wait_event(read)
        return buffer.zero_() if zero else buffer

    def give_back(self, buffer: Tensor, *, after: torch.cuda.Event | None = None) -> None:
        """Make the buffer available again, once `after` has come."""
        if after is not None:
            self._read[buffer.data_ptr()] = after
        self._free[buffer.numel(), buffer.dtype].append(buffer)

    def release(self) -> None:
        """Free the memory of all buffers that are not borrowed."""
        self._free = {kind: [] for kind in self._free}
        self._read.clear()
