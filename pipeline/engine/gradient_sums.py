"""Sums of gradients over micro-batches, on the device where they are found or off it."""

from collections.abc import Callable

from torch import Tensor

from pipeline.engine.side_stream import GradientCopies, Mark

PIECE = 1 << 24
"""Elements of a sum in main memory that are on the GPU at once to be added to: 64 MiB in fp32."""


class RunningSum:
    """The sum so far, micro-batch after micro-batch: ((g1 + g2) + g3) + ...

    Its memory is allocated from the first gradient of a step to the end of the step.
    """

    def __init__(self, empty: Callable[[], Tensor]) -> None:
        self._empty = empty
        self._total: Tensor | None = None
        self.empty = True

    @property
    def total(self) -> Tensor:
        """The sum; undefined while `empty`."""
        if self._total is None:
            self._total = self._empty()
        return self._total

    @property
    def direct(self) -> Tensor | None:
        """Where the first gradient may be written instead of `add`; then set `empty = False`."""
        return self.total if self.empty else None

    def add(self, gradient: Tensor) -> None:
        """Add what a backward pass found; `gradient` may change once `read` has come."""
        if self.empty:
            self.total.copy_(gradient)
        else:
            self.total.add_(gradient)
        self.empty = False

    @property
    def read(self) -> Mark | None:
        """The moment after which what was added last has been read; None if it is over."""
        return None

    def end_micro_batch(self) -> None:
        """Does nothing: every addition is final."""

    def finish(self) -> Tensor:
        """The sum over all micro-batches; zeros where there was none."""
        if self.empty:
            self.total.zero_()
            self.empty = False
        return self.total

    def clear(self) -> None:
        """Forget everything."""
        self._total = None
        self.empty = True

    def tensors(self) -> list[Tensor]:
        """What takes memory now."""
        return [] if self._total is None else [self._total]


class OffloadedSum(RunningSum):
    """A running sum in main memory of gradients on a GPU; neither host nor backward pass waits.

    The GPU adds: the sum so far comes to it and goes back, a piece at a time, beside the
    computation. So the host has nothing to do until the sum is asked for, and the bits are those of
    the sum on either side.
    """

    def __init__(self, empty: Callable[[], Tensor], copies: GradientCopies) -> None:
        super().__init__(empty)
        self._copies = copies
        self._read: Mark | None = None

    @property
    def direct(self) -> None:
        """Always None: nothing on the GPU writes straight to a sum in main memory."""

    def add(self, gradient: Tensor) -> None:
        """Add what a backward pass found; `gradient` may change once `read` has come."""
        total, is_first = self.total, self.empty

        def copy() -> None:
            if is_first:
                total.copy_(gradient, non_blocking=True)
                return
            for own, found in zip(total.split(PIECE), gradient.split(PIECE), strict=True):
                added = own.to(found.device, non_blocking=True, copy=True).add_(found)
                own.copy_(added, non_blocking=True)

        self._read = self._copies.start(gradient, copy)
        self.empty = False

    @property
    def read(self) -> Mark | None:
        """The moment after which what was added last has been read."""
        return self._read

    def finish(self) -> Tensor:
        """The sum over all micro-batches, which the host waits for; zeros where there was none."""
        self._wait()
        return super().finish()

    def clear(self) -> None:
        """Forget everything."""
        self._wait()
        super().clear()

    def _wait(self) -> None:
        if self._read is not None:
            self._copies.wait(self._read)
            self._read = None


class TreeSum:
    """The sum as a binary tree over micro-batches, whatever their number on this process.

    Like a binary counter: two sums of 2^k micro-batches become one of 2^(k + 1). If ranks are
    summed as a tree as well, and micro-batch i is on rank i modulo W, the tree over all
    micro-batches is the same for every power of two W. Holds at most log2(micro-batches) + 1 sums.
    `current` is that of the micro-batch at hand.
    """

    def __init__(self, empty: Callable[[], Tensor], current: RunningSum) -> None:
        self._empty = empty
        self._current = current
        self._levels: list[tuple[int, Tensor]] = []

    direct = None

    def add(self, gradient: Tensor) -> None:
        """Add what a backward pass of the present micro-batch found."""
        self._current.add(gradient)

    @property
    def read(self) -> Mark | None:
        """The moment after which what was added last has been read; None if it is over."""
        return self._current.read

    def end_micro_batch(self) -> None:
        """Add the micro-batch to the sums of as many others."""
        if self._current.empty:
            return
        level, value = 0, self._current.finish()
        self._current.clear()
        while self._levels and self._levels[-1][0] == level:
            value = self._levels.pop()[1] + value
            level += 1
        self._levels.append((level, value))

    def finish(self) -> Tensor:
        """The sum over all micro-batches, the smallest sums first; zeros where there was none."""
        self.end_micro_batch()
        if not self._levels:
            return self._empty().zero_()
        value = self._levels[-1][1]
        for _, larger in reversed(self._levels[:-1]):
            value = larger + value
        return value

    def clear(self) -> None:
        """Forget everything."""
        self._current.clear()
        self._levels.clear()

    def tensors(self) -> list[Tensor]:
        """What takes memory now."""
        return [*self._current.tensors(), *(value for _, value in self._levels)]
