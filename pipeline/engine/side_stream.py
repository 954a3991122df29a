"""Work that a GPU does beside its computation, and what the two wait for of each other."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

AT_ONCE = 2
"""Gradients on their way to main memory: one is copied while the next is computed."""


class Mark(Protocol):
    """A moment of a stream: all that was given to it before."""

    def hold_computation(self) -> None:
        """Have the computation continue only after it, without blocking the host."""

    def synchronize(self) -> None:
        """Block the host until the moment has come."""

    def has_come(self) -> bool:
        """Whether the moment has come, without waiting."""
        ...


class Stream(Protocol):
    """What runs in turn, beside the computation."""

    def run(self, work: Callable[[], object]) -> Mark:
        """Have `work` done after all that was given to the computation and to this until now."""
        ...


class CudaMark:
    """An event of a stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def hold_computation(self) -> None:
        """As `Mark` has it."""
        torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        """As `Mark` has it."""
        self._event.synchronize()

    def has_come(self) -> bool:
        """As `Mark` has it."""
        return self._event.query()


class CudaStream:
    """A stream of a GPU beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], object]) -> CudaMark:
        """As `Stream` has it; `work` allocates of this stream's own memory."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            event = torch.cuda.Event()
            event.record()
        return CudaMark(event)


class GradientCopies:
    """Gradients on their way from a GPU to main memory, at most `AT_ONCE` of an engine."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._under_way: deque[tuple[Mark, Tensor]] = deque()

    def start(self, gradient: Tensor, work: Callable[[], object]) -> Mark:
        """Have `work` done, which reads `gradient`; its memory stays until the mark has come.

        Where too many are under way the computation waits for the oldest, and not the host.
        """
        while len(self._under_way) >= AT_ONCE:
            self._under_way.popleft()[0].hold_computation()
        mark = self._stream.run(work)
        self._under_way.append((mark, gradient))
        return mark

    def wait(self, mark: Mark) -> None:
        """Return when `mark` has come, and keep no gradient that has been copied."""
        mark.synchronize()
        while self._under_way and self._under_way[0][0].has_come():
            self._under_way.popleft()


def gradient_copies(device: torch.device) -> GradientCopies | None:
    """The copies of an engine whose model computes on `device`; None where that is main memory."""
    return GradientCopies(CudaStream(device)) if device.type == "cuda" else None
