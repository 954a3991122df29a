"""Gradients on their way from autograd to the optimizer: buffers, and sums over micro-batches."""

from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.engine.buffers import BufferPool
from pipeline.engine.comm import Work
from pipeline.engine.flat import FlatParams
from pipeline.engine.units import ROOT


class RunningSum:
    """The sum so far, micro-batch after micro-batch: ((g1 + g2) + g3) + ...

    It has memory from the first gradient of a step until the step is over.
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
        """Where the first gradient may be written in place of `add`; then say `empty = False`."""
        return self.total if self.empty else None

    def add(self, gradient: Tensor) -> None:
        """Add what a backward pass found; `gradient` may be overwritten afterwards.

        Between devices it waits for the copy: the host would go on with numbers still on their way.
        """
        if self.empty:
            self.total.copy_(gradient)
        else:
            self.total.add_(gradient.to(self.total.device))
        self.empty = False

    def end_micro_batch(self) -> None:
        """Nothing to do: every addition is final."""

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


class TreeSum:
    """The sum as a binary tree over micro-batches, whatever their number on this process.

    Like a binary counter: two sums of 2^k micro-batches become one of 2^(k + 1). With ranks added
    as a tree as well, and micro-batch i on rank i modulo W, the tree over all micro-batches is the
    same for every W that is a power of two. It holds at most log2(micro-batches) + 1 sums.
    """

    def __init__(self, empty: Callable[[], Tensor]) -> None:
        self._empty = empty
        self._current = RunningSum(empty)
        self._levels: list[tuple[int, Tensor]] = []

    direct = None

    def add(self, gradient: Tensor) -> None:
        """Add what a backward pass of the present micro-batch found."""
        self._current.add(gradient)

    def end_micro_batch(self) -> None:
        """Add the micro-batch to the sums of as many others."""
        if self._current.empty:
            return
        level, value = 0, self._current.total
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


class FlatGradients:
    """The gradient of one flat vector: a buffer for autograd, and the sum of the own piece.

    Autograd adds straight into the buffer, of which the parameters' `.grad` are views: in fp32, or
    in the weights' own type where each gets one gradient, and nothing is rounded. A finished buffer
    is reduced as a whole, in fp32, into the sum of the process whose piece it is.
    """

    def __init__(self, flat: FlatParams, pool: BufferPool) -> None:
        self.flat, self.pool, self.comm = flat, pool, flat.comm
        placement = flat.placement
        kind = TreeSum if placement.deterministic else RunningSum
        self.sum: TreeSum | RunningSum = kind(
            lambda: placement.host_empty(flat.shard_numel, torch.float32, placement.gradient_device)
        )
        self.found: set[str] = set()
        """Parameters that have had a gradient here since `clear`."""
        self._buffer: Tensor | None = None
        self._reduction: tuple[Work, Tensor, Tensor] | None = None
        self._dtype = flat.settings.dtype
        self.expect(once=False)

    def expect(self, *, once: bool) -> None:
        """Say whether each parameter gets one gradient at most before the next reduction.

        It holds from the next buffer on, also for what a forward pass has left already.
        """
        own = self.flat.settings.dtype
        narrow = once and own.itemsize < torch.float32.itemsize and self.comm.adds_in_fp32
        dtype = own if narrow else torch.float32
        if self._buffer is not None or dtype == self._dtype:
            return
        self._dtype = dtype
        for param in self.flat.params.values():
            param.grad = None
            param.grad_dtype = dtype  # pyright: ignore[reportAttributeAccessIssue]

    def begin(self) -> None:
        """Have autograd write into a buffer of zeros, or go on in the one it has."""
        if self._buffer is not None:
            return
        self.settle()
        direct = self._direct() if self.comm.size == 1 else None
        if direct is not None:
            self._buffer = direct.zero_()
        else:
            self._buffer = self.borrow(self._dtype, zero=True)
        for name, view in self.flat.cut(self._buffer).items():
            # With `.data` each has a version of its own, which counts what autograd adds to it.
            self.flat.params[name].grad = view.data

    def borrow(self, dtype: torch.dtype = torch.float32, *, zero: bool = False) -> Tensor:
        """A buffer of the whole vector's length, from the pool."""
        # One block's buffer may be reduced while the next one's fills, and a third be read still by
        # processes that are a block behind; there is but one root.
        at_most = 1 if self.flat.unit == ROOT else 2 + self.comm.defers
        narrow = None if dtype == torch.float32 else dtype
        return self.pool.borrow(
            self.flat.numel, torch.float32, at_most=at_most, zero=zero, narrow=narrow
        )

    def start_reduction(self) -> None:
        """Begin to sum the buffer over processes.

        Raises:
            RuntimeError: gradients went elsewhere than into the buffer, as after `zero_grad()`.
        """
        self._check_taken()
        if self._buffer is None:
            return
        self.settle()
        for name, param in self.flat.params.items():
            if param.grad is not None and param.grad._version > 0:  # noqa: SLF001
                self.found.add(name)
            param.grad = None
        buffer, self._buffer = self._buffer, None
        direct = self._direct()
        if direct is not None:
            out = direct
        elif buffer.dtype == torch.float32:
            out = self.comm.piece(buffer)
        else:
            out = torch.empty(self.flat.shard_numel, dtype=torch.float32, device=buffer.device)
        work = self.comm.reduce_scatter(buffer, out, self.flat.unit)
        self._reduction = (work, buffer, out)

    def _check_taken(self) -> None:
        views = {} if self._buffer is None else self.flat.cut(self._buffer)
        for name, param in self.flat.params.items():
            grad = param.grad
            there = None if grad is None else grad.data_ptr()
            expected = views[name].data_ptr() if name in views else None
            if there != expected:
                raise RuntimeError(
                    f"the gradient of {name} is not where the engine put it: leave `.grad` to the"
                    " engine (no zero_grad(), no create_graph), and don't change a view that a"
                    " module returns in place"
                )

    def settle(self) -> None:
        """Wait for the reduction under way and add its result to the sum."""
        if self._reduction is None:
            return
        (work, buffer, out), self._reduction = self._reduction, None
        work.wait()
        if isinstance(self.sum, RunningSum) and out is self.sum.direct:
            self.sum.empty = False
        else:
            self.sum.add(out)
        if buffer is not out:
            self.pool.give_back(buffer)

    def clear(self) -> None:
        """Forget what has been accumulated."""
        self.settle()
        if self._buffer is not None:
            for param in self.flat.params.values():
                param.grad = None
            if self._buffer is not self.sum.direct:
                self.pool.give_back(self._buffer)
            self._buffer = None
        self.sum.clear()
        self.found.clear()

    def _direct(self) -> Tensor | None:
        placement = self.flat.placement
        offloaded = placement.gradient_device != placement.device
        return None if offloaded else self.sum.direct
