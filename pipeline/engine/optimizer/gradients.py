"""Gradients between autograd and the optimizer: buffers, sums, the norm and the loss scale.

The global norm is bitwise identical for any number of processes that divides CHUNKS: each vector is
divided into CHUNKS equal chunks. One process sums the squares of a chunk's elements, with the same
code on the same number of elements, and one exact all-reduce adds up the sums.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.config import LossScaleConfig
from pipeline.engine.comm.collectives import BufferPool, Collectives, GradientCopies, Work
from pipeline.engine.sharding.flat import FlatParams, num_chunks
from pipeline.engine.sharding.units import ROOT
from pipeline.parallel.group import Group

TRANSFER_ELEMENTS = 1 << 24
"""Number of elements of a sum in host memory that the GPU processes at once: 64 MiB in fp32."""

BLOCK = 262144
"""Number of elements converted to fp64 at once: 2 MiB, enough to amortize a call."""

MAX_HOST_SUMS = 256
"""Maximum number of chunks per vector whose sums are added, exactly, on the host."""

ROW_ELEMENTS = 4096
"""Row length of a sum: PyTorch distributes rows over threads but never splits such a short row,
so the order of addition is the same for any number of threads."""


class RunningSum:
    """A running sum over micro-batches: ((g1 + g2) + g3) + ...

    Its memory is allocated by the first gradient of a step and freed after the step. With `copies`
    the sum is in host memory and the gradients are on a GPU, which adds them on a side stream
    without blocking host or GPU: the sum is copied to the GPU and back, one chunk at a time.
    """

    def __init__(self, create: Callable[[], Tensor], copies: GradientCopies | None = None) -> None:
        self._create, self._copies = create, copies
        self._total: Tensor | None = None
        self.is_empty = True
        self.read: torch.cuda.Event | None = None
        """Event after which the last added gradient has been read; None if none is pending."""

    @property
    def total(self) -> Tensor:
        """The sum; undefined while `is_empty`."""
        if self._total is None:
            self._total = self._create()
        return self._total

    def add(self, gradient: Tensor) -> None:
        """Add a gradient, which may be overwritten after the event `read`."""
        total, is_first = self.total, self.is_empty
        self.is_empty = False
        if self._copies is None:
            (total.copy_ if is_first else total.add_)(gradient)
            return

        def copy() -> None:
            if is_first:
                total.copy_(gradient, non_blocking=True)
                return
            size = TRANSFER_ELEMENTS
            for chunk, addend in zip(total.split(size), gradient.split(size), strict=True):
                added = chunk.to(addend.device, non_blocking=True, copy=True).add_(addend)
                chunk.copy_(added, non_blocking=True)

        self.read = self._copies.start(gradient, copy)

    def end_micro_batch(self) -> None:
        """Do nothing: every addition is final."""

    def finish(self) -> Tensor:
        """Return the sum over all micro-batches (zeros if none), after pending additions."""
        self._wait()
        if self.is_empty:
            self.total.zero_()
            self.is_empty = False
        return self.total

    def clear(self) -> None:
        """Reset the sum."""
        self._wait()
        self._total = None
        self.is_empty = True

    def tensors(self) -> list[Tensor]:
        """Return the allocated tensors."""
        return [] if self._total is None else [self._total]

    def _wait(self) -> None:
        if self.read is not None and self._copies is not None:
            self._copies.wait(self.read)
            self.read = None


class TreeSum:
    """A sum over any number of micro-batches on this process, accumulated as a binary tree.

    It works like a binary counter: two sums of 2^k micro-batches become one of 2^(k + 1), so it
    holds at most log2(micro-batches) + 1 partial sums. If these are also summed over ranks in a
    tree, and micro-batch i is on rank i modulo W of W ranks, the tree over all micro-batches is the
    same for every power of two W. `current` is the sum of the current micro-batch.
    """

    def __init__(self, create: Callable[[], Tensor], current: RunningSum) -> None:
        self._create = create
        self._current = current
        self._levels: list[tuple[int, Tensor]] = []

    def end_micro_batch(self) -> None:
        """Merge the micro-batch's sum with earlier sums of equal size."""
        if self._current.is_empty:
            return
        level, value = 0, self._current.finish()
        self._current.clear()
        while self._levels and self._levels[-1][0] == level:
            value = self._levels.pop()[1] + value
            level += 1
        self._levels.append((level, value))

    def finish(self) -> Tensor:
        """Return the sum over micro-batches (zeros if none), adding small sums first."""
        self.end_micro_batch()
        if not self._levels:
            return self._create().zero_()
        value = self._levels[-1][1]
        for _, larger in reversed(self._levels[:-1]):
            value = larger + value
        return value

    def clear(self) -> None:
        """Reset the sum."""
        self._current.clear()
        self._levels.clear()

    def tensors(self) -> list[Tensor]:
        """Return the allocated tensors."""
        return [*self._current.tensors(), *(value for _, value in self._levels)]


class FlatGradients:
    """The gradient of one flat vector: from autograd to the sum of the local shard.

    A parameter's gradient, in the dtype of its weight, is added to an fp32 vector as soon as
    autograd has computed it, and `.grad` is reset to None. If there is one process and gradients
    stay on its device, that vector is the sum; otherwise it is a buffer that is reduce-scattered.
    """

    def __init__(self, flat: FlatParams, pool: BufferPool) -> None:
        self.flat, self.pool, self.comm = flat, pool, flat.comm
        placement = flat.placement
        copies = pool.copies if placement.gradient_device != placement.device else None
        self._running = RunningSum(self._allocate, copies)
        self.sum: TreeSum | RunningSum = (
            TreeSum(self._allocate, self._running) if placement.deterministic else self._running
        )
        self._on_device = copies is None
        self._in_place = self.comm.size == self.comm.num_copies == 1 and self._on_device
        self._buffer: Tensor | None = None
        self._views: dict[str, Tensor] = {}
        self._undefined: set[str] = set()
        """Names of parameters whose range of the buffer is not initialized."""
        self._reduction: tuple[Work, Tensor, Tensor | None] | None = None
        hook = partial(FlatGradients._accumulate, weakref.proxy(self))  # doesn't keep `self` alive
        for name, param in flat.params.items():
            if flat.unit == ROOT:  # autograd sums the gradients of tied weights before the hook
                param.grad_dtype = torch.float32
            param.register_post_accumulate_grad_hook(partial(hook, name))

    def _allocate(self) -> Tensor:
        device = self.flat.placement.gradient_device
        return self.comm.empty(self.flat.shard_numel, torch.float32, device)

    def begin(self) -> None:
        """Provide a vector for the gradients of a backward pass, unless there already is one."""
        if self._buffer is not None:
            return
        self.finish_reduction()
        if self._in_place:
            self._buffer = self._running.total
        else:
            self._buffer = self.pool.acquire(self.flat.numel, torch.float32)
        self._views = self.flat.unflatten(self._buffer)
        if not self._in_place or self._running.is_empty:
            self._undefined = set(self._views)
            for gap in self.flat.gaps:
                self._buffer[gap].zero_()

    def _accumulate(self, name: str, param: Tensor) -> None:
        """Add a gradient that autograd has completed."""
        gradient, param.grad = param.grad, None
        if self._buffer is None or gradient is None:
            raise RuntimeError(
                f"the gradient of {name} arrived before its block's backward pass: don't modify a"
                " module's output in place if it is a view"
            )
        view = self._views[name]
        (view.copy_ if name in self._undefined else view.add_)(gradient.detach())
        self._undefined.discard(name)

    def start_reduction(self) -> None:
        """Start summing the buffer over processes."""
        if self._buffer is None:
            return
        self.finish_reduction()
        for name in self._undefined:
            self._views[name].zero_()
        self._undefined.clear()
        buffer, self._buffer = self._buffer, None
        if self._in_place:
            self._running.is_empty = False
            return
        is_sum = self._running.is_empty and self._on_device
        out = self._running.total if is_sum else self.comm.local_shard(buffer)
        work = self.comm.reduce_scatter(buffer, out, self.flat.unit)
        self._reduction = (work, buffer, None if is_sum else out)

    def finish_reduction(self) -> None:
        """Wait for the pending reduction and add its result to the sum."""
        if self._reduction is None:
            return
        (work, buffer, out), self._reduction = self._reduction, None
        work.wait()
        if out is None:
            self._running.is_empty = False
        else:
            self._running.add(out)
        self.pool.release(buffer, after=self._running.read)

    def clear(self) -> None:
        """Discard the accumulated gradients."""
        self.finish_reduction()
        if self._buffer is not None and not self._in_place:
            self.pool.release(self._buffer)
        self._buffer, self._views = None, {}
        self.sum.clear()


def squared_norms(shard: Float[Tensor, " k"], rows: int) -> Float[Tensor, " rows"]:
    """Return the sum of squares of each of `rows` equal chunks of `shard`, in float64."""
    chunks = shard.view(rows, -1)
    if shard.device.type != "cpu":
        # Accumulates in fp64 without vector_norm's fp64 copy of the input.
        norm = torch.ops.aten._foreach_norm  # noqa: SLF001
        return torch.stack(norm(chunks.unbind(), 2, dtype=torch.float64)).square()
    # On a CPU, a reduction that casts is 20 times slower than a cast followed by a sum.
    scratch = torch.empty(BLOCK, dtype=torch.float64)
    return torch.tensor([_sum_of_squares(row, scratch) for row in chunks], dtype=torch.float64)


def chunk_squares(shard: Float[Tensor, " k"], comm: Collectives) -> Float[Tensor, " rows"]:
    """Return the sums of squares of a reduced gradient by chunk: `num_chunks` float64 values.

    Each process computes some of the chunks; its values for all other chunks are zero.
    """
    rows = num_chunks(comm.size)
    values = torch.zeros(rows, dtype=torch.float64, device=shard.device)
    if comm.copy_index == 0:  # all copies have the same sum: count it once
        comm.local_shard(values).copy_(squared_norms(shard, rows // comm.size))
    return values


class NormReducer:
    """Combines the processes' sums of squared gradients; all processes must create it together."""

    def __init__(self, group: Group, units: Sequence[str]) -> None:
        self._group = group
        units_by_rank = group.gather_objects(list(units))
        self.units = [unit for rank_units in units_by_rank for unit in rank_units]
        """The unit of each vector, in rank order."""
        self._offset = sum(len(rank_units) for rank_units in units_by_rank[: group.rank])
        self._num_local = len(units)

    def reduce(self, squares: Sequence[float]) -> Sequence[float]:
        """Concatenate the sums of all processes' vectors; `squares` contains this process's sums.

        Each value is nonzero on one process only, so the all-reduce is exact.
        """
        if self._group.size == 1:
            return squares
        per_vector = len(squares) // self._num_local
        after = len(self.units) - self._offset - self._num_local
        values = [*[0.0] * (self._offset * per_vector), *squares, *[0.0] * (after * per_vector)]
        return self._group.sums(values)


def _sum_of_squares(values: Float[Tensor, " n"], scratch: Float[Tensor, " b"]) -> float:
    sums: list[float] = []
    for piece in values.split(len(scratch)):
        squares = scratch[: len(piece)].copy_(piece)
        squares.mul_(squares)
        full_rows = len(piece) // ROW_ELEMENTS * ROW_ELEMENTS
        sums += squares[:full_rows].view(-1, ROW_ELEMENTS).sum(dim=1).tolist()
        sums.append(squares[full_rows:].sum().item())
    return math.fsum(sums)


@dataclass
class LossScaler:
    """Dynamic loss scale for fp16 gradients (Micikevicius et al. 2018, section 3.2).

    A step whose gradients overflow is skipped and costs one of `hysteresis` tokens; when only one
    is left, every overflow halves the scale. Every `loss_scale_window` good steps in a row, not
    counting the first, double the scale and refill the tokens. If not `enabled`, the scale is 1; a
    static scale never changes. In all cases the engine skips steps with non-finite gradients. This
    is equivalent to DeepSpeed's `DynamicLossScaler`.
    """

    enabled: bool
    config: LossScaleConfig = field(default_factory=LossScaleConfig)
    scale: float = field(init=False)
    good_steps: int = field(init=False, default=0)
    """Number of good steps since the last overflow."""

    tokens: int = field(init=False)
    """Number of overflows until the scale is halved; at 1, the next one halves it."""

    is_exhausted: bool = field(init=False, default=False)
    """True if the last step overflowed at the lowest scale."""

    def __post_init__(self) -> None:
        self.scale = self.config.initial_scale if self.enabled else 1.0
        self.tokens = self.config.hysteresis

    @property
    def is_searching(self) -> bool:
        """True if the scale is dynamic and overflows can still reduce it."""
        return self.enabled and not self.config.loss_scale and not self.is_exhausted

    def update(self, *, finite: bool) -> None:
        """Record whether the step's gradients were finite."""
        if not self.enabled or self.config.loss_scale:
            return
        self.is_exhausted = False
        if finite:
            window = self.config.loss_scale_window
            window_done = self.good_steps > 0 and self.good_steps % window == 0
            if window_done:
                self.scale *= 2
            if window_done or self.config.consecutive_hysteresis:
                self.tokens = self.config.hysteresis
            self.good_steps += 1
            return
        self.good_steps = 0
        if self.tokens > 1:
            self.tokens -= 1
            return
        lowest = float(self.config.min_loss_scale)
        self.is_exhausted = self.scale <= lowest
        self.scale = max(self.scale / 2, lowest)

    def state_dict(self) -> dict[str, float | int | bool]:
        """Return the state for `load_state_dict`."""
        return {name: getattr(self, name) for name in ("enabled", "scale", "good_steps", "tokens")}

    def load_state_dict(self, state: Mapping[str, float | int | bool]) -> None:
        """Restore the scale and the counters from a `state_dict`.

        A static scale keeps its setting. The state of a disabled scaler, from a run in a different
        precision, doesn't apply to fp16: the search starts at the configured initial scale.
        """
        if not self.enabled or self.config.loss_scale:
            return
        self.is_exhausted = False
        if state["enabled"]:
            self.scale = float(state["scale"])
            self.good_steps = int(state["good_steps"])
            self.tokens = int(state["tokens"])
        else:
            self.__post_init__()
            self.good_steps = 0
