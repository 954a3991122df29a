"""Gradients between autograd and the optimizer: buffers, reductions, sums."""

import torch
from torch import Tensor

from pipeline.engine.buffers import BufferPool
from pipeline.engine.comm import Work
from pipeline.engine.flat import FlatParams
from pipeline.engine.gradient_sums import OffloadedSum, RunningSum, TreeSum


class FlatGradients:
    """The gradient of one flat vector: a buffer for autograd, and the sum of the own piece.

    Autograd accumulates directly into the buffer, of which the parameters' `.grad` are views: in
    fp32, or in the weights' own dtype where each gets exactly one gradient, so that nothing is
    rounded. A finished buffer is reduced in fp32, each shard into the sum of its process.
    """

    def __init__(self, flat: FlatParams, pool: BufferPool) -> None:
        self.flat, self.pool, self.comm = flat, pool, flat.comm
        placement = flat.placement
        copies = pool.copies if placement.offloads_gradients else None
        running = RunningSum(self._empty) if copies is None else OffloadedSum(self._empty, copies)
        self.sum: TreeSum | RunningSum = (
            TreeSum(self._empty, running) if placement.deterministic else running
        )
        self.found: set[str] = set()
        """Parameters that have had a gradient here since `clear`."""
        self._buffer: Tensor | None = None
        self._reduction: tuple[Work, Tensor, Tensor] | None = None
        self._dtype = flat.settings.dtype
        self.expect(once=False)

    def _empty(self) -> Tensor:
        placement = self.flat.placement
        numel, device = self.flat.shard_numel, placement.gradient_device
        return placement.host_empty(numel, torch.float32, device)

    def expect(self, *, once: bool) -> None:
        """Declare whether each parameter gets at most one gradient before the next reduction.

        Takes effect with the next buffer, also for graphs that already exist.
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
        """Have autograd write into a zeroed buffer, or continue in the current one."""
        if self._buffer is not None:
            return
        self.settle()
        direct = self._direct() if self.comm.size == 1 else None
        if direct is not None:
            self._buffer = direct.zero_()
        else:
            self._buffer = self.borrow(self._dtype, zero=True)
        for name, view in self.flat.cut(self._buffer).items():
            # With `.data` each has its own version counter, which counts autograd's additions.
            self.flat.params[name].grad = view.data

    def borrow(self, dtype: torch.dtype = torch.float32, *, zero: bool = False) -> Tensor:
        """A buffer of the whole vector's length, from the pool."""
        # One block's buffer may be reduced while the next one's fills, and processes that are a
        # block behind may still read a third; what lies outside of blocks is there once.
        at_most = 2 + self.comm.defers if self.flat.is_block else 1
        narrow = None if dtype == torch.float32 else dtype
        return self.pool.borrow(
            self.flat.numel, torch.float32, at_most=at_most, zero=zero, narrow=narrow
        )

    def start_reduction(self) -> None:
        """Start summing the buffer over processes.

        Raises:
            RuntimeError: gradients are not in the buffer, for example after `zero_grad()`.
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
        """Wait for the pending reduction and add its result to the sum."""
        if self._reduction is None:
            return
        (work, buffer, out), self._reduction = self._reduction, None
        work.wait()
        if isinstance(self.sum, RunningSum) and out is self.sum.direct:
            self.sum.empty = False
        else:
            self.sum.add(out)
        if buffer is not out:
            self.pool.give_back(buffer, after=self.sum.read)

    def clear(self) -> None:
        """Discard what has been accumulated."""
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
        """The sum, where what is found can be written straight into it; else None."""
        placement = self.flat.placement
        offloaded = placement.gradient_device != placement.device
        return None if offloaded else self.sum.direct
