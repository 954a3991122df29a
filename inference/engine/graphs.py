"""Decoding passes on a GPU from CUDA graphs: one launch instead of a model's hundreds.

A graph reads tokens, their places and the lengths of the sequences from memory of the GPU, which
one copy fills before each replay. Like a trace it is verified before it is trusted.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.engine.cache import attend_by_kernel
from inference.engine.pieces import StepLayout
from inference.engine.replay import (
    Column,
    Pass,
    ReplayedRows,
    ReplayError,
    is_rounding,
    relative_difference,
)
from inference.engine.trace import TraceRecorder
from pipeline.kernels.decode_attention.dispatch import kernel_for

Capture = Callable[[Callable[[], Tensor], Tensor], Callable[[], Tensor]]
"""Given a computation and the memory of its inputs: what computes it again and returns the result,
which always lies in the same memory."""

Agree = Callable[[bool], bool]
"""Whether this process and all that compute the layers with it say yes; they call it in step."""


class LiveKeys:
    """One token of each sequence, which sees what its slot holds up to itself.

    Lengths are read on the GPU, so that a graph may be replayed with others, up to `longest`.
    """

    def __init__(self, num_rows: int, longest: int, device: torch.device) -> None:
        self.ends: Int[Tensor, " N"] = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.longest = longest

    def attend(
        self,
        query: Float[Tensor, "1 H N D"],
        key: Float[Tensor, "S G M D"],
        value: Float[Tensor, "S G M E"],
        *,
        scaling: float | None,
        sliding_window: int | None,
        dropout: float,
    ) -> Float[Tensor, "1 N H E"]:
        """Attention of each token to the live keys of its own slot.

        Raises:
            ReplayError: there is no kernel for it on this GPU.
        """
        del dropout  # generation has none
        rows = query[0].transpose(0, 1)
        if query.is_cuda and kernel_for(rows, key, value) is None:
            raise ReplayError("no kernel of attention takes it")
        return attend_by_kernel(
            rows,
            key,
            value,
            self.ends,
            scaling=scaling,
            sliding_window=sliding_window,
            longest=min(self.longest, key.shape[2]),
        )[None]


class GraphedRows(ReplayedRows):
    """Passes of one number of rows, of sequences up to `longest`, from a graph.

    Those of a model that is divided among processes have its collectives in them. All go by graphs
    or none does, because a process that verifies a pass computes it twice.
    """

    def __init__(
        self,
        modules: Pass,
        num_rows: int,
        *,
        longest: int,
        device: torch.device,
        capture: Capture,
        agree: Agree,
    ) -> None:
        super().__init__(num_rows)
        self._modules = modules
        # Of each row token, position, place in the cache, adapter and length of the sequence.
        self._staged: Int[Tensor, "5 N"] = torch.zeros(
            5, num_rows, dtype=torch.long, pin_memory=device.type == "cuda"
        )
        self._numbers = self._staged.to(device, copy=True)
        self._layout = LiveKeys(num_rows, longest, device)
        self._capture = capture
        self._agree = agree
        self._graph: Callable[[], Tensor] | None = None
        self._num_live = num_rows
        """Rows of the pass at hand that are no padding."""

    def _take(self, columns: Sequence[Column], layout: StepLayout) -> None:
        self._num_live = layout.num_read
        padding = [0] * (len(columns) - len(layout.lengths))
        # Whoever asked for the pass before has its tokens: the copy from this memory is over.
        self._staged[:4] = torch.tensor(columns).T
        self._staged[4] = torch.tensor([*layout.lengths, *padding])
        self._numbers.copy_(self._staged, non_blocking=True)

    def _by_modules(self) -> Float[Tensor, "N V"]:
        self._layout.ends.copy_(self._numbers[4])
        return self._modules(self._numbers[:4], self._layout)

    def _record(self) -> Float[Tensor, "N V"]:
        try:
            self._graph = self._capture(self._by_modules, self._numbers)
        except Exception:
            self._agree(False)
            raise
        self._require_all()
        return self._graph()

    def _verify(self) -> Float[Tensor, "N V"]:
        """The pass both ways, which must agree up to rounding.

        cuBLAS may choose another kernel on the stream of the capture, for it has other memory
        there: the sums of a product are then added in another order, as between batch sizes.
        """
        expected = self._by_modules()
        live = slice(self._num_live)
        self.difference = relative_difference(self._replay()[live], expected[live])
        if not is_rounding(self.difference, expected.dtype):
            self._agree(False)
            raise ReplayError(
                "a graph does not repeat its modules: logits differ by"
                f" {self.difference:.1g} of the largest"
            )
        self._require_all()
        return expected

    def _require_all(self) -> None:
        """Go on if the others do.

        Raises:
            ReplayError: one can't.
        """
        if not self._agree(True):
            raise ReplayError("a process that computes the layers with this one has no graph")

    def _replay(self) -> Float[Tensor, "N V"]:
        assert self._graph is not None
        return self._graph()


class CudaCapture:
    """Captures passes of one model into CUDA graphs that share their memory.

    Only one of them runs at a time, and nobody reads a result after the next replay.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(
        self,
        compute: Callable[[], Tensor],
        inputs: Tensor,  # noqa: ARG002
    ) -> Callable[[], Tensor]:
        """Record the computation, as `Capture` has it.

        Raises:
            ReplayError: the modules do what a graph can't hold, such as waiting for a number.
        """
        graph = torch.cuda.CUDAGraph()
        current, beside = torch.cuda.current_stream(self._device), capture_stream(self._device)
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            # Once without capturing, for a capture that fails leaves the allocator in disorder. It
            # also leaves cuBLAS a workspace of this stream that is not of the graph's memory.
            require_capturable(compute)
            # Other threads, of checkpoints for one, may go on talking to the GPU.
            with no_garbage_collection():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = compute()
                finally:
                    graph.capture_end()
        current.wait_stream(beside)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of a GPU on which all is captured: each would keep memory of its own."""
    return torch.cuda.Stream(device)


def require_capturable(compute: Callable[[], Tensor]) -> None:
    """Compute once, and refuse what a graph can't hold.

    PyTorch's own `torch.cuda.set_sync_debug_mode` holds for all threads: that which writes a
    checkpoint meanwhile has to wait for the GPU.

    Raises:
        ReplayError: an operator has the host wait for the GPU, or draws random numbers.
    """
    with TraceRecorder():
        compute()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Inside it, Python frees no cycles of objects.

    Those of a graph or a stream of the GPU would be freed by calls that end a capture.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
