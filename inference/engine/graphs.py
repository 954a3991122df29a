"""Decoding passes on a GPU from CUDA graphs: one launch instead of a model's hundreds.

A graph reads tokens, their places and the lengths of the sequences from memory of the GPU, which
one copy fills before each replay.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.engine.cache import NextToken, attend_by_kernel
from inference.engine.replay import Column, Pass, ReplayedRows, ReplayError, TraceRecorder
from pipeline.kernels.decode_attention import kernel_for

Capture = Callable[[Callable[[], Tensor], Tensor], Callable[[], Tensor]]
"""Given a computation and the memory of its inputs, returns a function that repeats it and returns
the result, always in the same memory."""

Agree = Callable[[bool], bool]
"""Whether all processes that compute the layers together pass True; they call it in step."""


class LiveKeys:
    """Attention of one token of each sequence to the tokens of its slot up to itself.

    Lengths are read on the GPU, so that a graph can be replayed with others, up to `longest`.
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
        """Attention by the kernel.

        Raises:
            ReplayError: there is no kernel for it on this GPU.
        """
        del dropout  # generation has none
        rows = query[0].transpose(0, 1)
        if query.is_cuda and kernel_for(rows, key, value) is None:
            raise ReplayError("there is no attention kernel for the model")
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

    The graphs of a tensor-parallel model contain its collectives. All processes replay graphs or
    none does, because a process that verifies a pass computes it twice.
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
        # Token, position, place in the cache, and length of the sequence of each row.
        self._staged: Int[Tensor, "4 N"] = torch.zeros(
            4, num_rows, dtype=torch.long, pin_memory=device.type == "cuda"
        )
        self._numbers = self._staged.to(device, copy=True)
        self._layout = LiveKeys(num_rows, longest, device)
        self._capture = capture
        self._agree = agree
        self._graph: Callable[[], Tensor] | None = None

    def _take(self, columns: Sequence[Column], layout: NextToken) -> None:
        padding = [0] * (len(columns) - len(layout.lengths))
        # The tokens of the last pass were read, so its copy from this memory has ended.
        self._staged[:3] = torch.tensor(columns).T
        self._staged[3] = torch.tensor([*layout.lengths, *padding])
        self._numbers.copy_(self._staged, non_blocking=True)

    def _by_modules(self) -> Float[Tensor, "N V"]:
        self._layout.ends.copy_(self._numbers[3])
        return self._modules(self._numbers[:3], self._layout)

    def _record(self) -> Float[Tensor, "N V"]:
        logits = self._by_modules()  # a graph's are not trusted before they are verified
        with self._together():
            self._graph = self._capture(self._by_modules, self._numbers)
        return logits

    def _verify(self, num_live: int) -> Float[Tensor, "N V"]:
        with self._together():
            return super()._verify(num_live)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Raise ReplayError unless the block succeeds on all processes."""
        try:
            yield
        except Exception:
            self._agree(False)
            raise
        if not self._agree(True):
            raise ReplayError("another process of the tensor-parallel group has no graph")

    def _replay(self) -> Float[Tensor, "N V"]:
        assert self._graph is not None
        return self._graph()


class CudaCapture:
    """Captures passes of one model into CUDA graphs that share their memory.

    Only one of them runs at a time, and no result is read after the next replay.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(
        self,
        compute: Callable[[], Tensor],
        inputs: Tensor,  # noqa: ARG002
    ) -> Callable[[], Tensor]:
        """Record the computation, as defined by `Capture`.

        Raises:
            ReplayError: the modules do what a graph can't contain, such as waiting for a number.
        """
        graph = torch.cuda.CUDAGraph()
        current, side = torch.cuda.current_stream(self._device), capture_stream(self._device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            # Once without capturing: a failed capture leaves the allocator in disorder. This also
            # gives cuBLAS a workspace on this stream outside the graph's memory.
            require_capturable(compute)
            # Other threads, such as a checkpoint's, may use the GPU meanwhile.
            with no_garbage_collection():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = compute()
                finally:
                    graph.capture_end()
        current.wait_stream(side)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of a GPU for captures: each stream would keep its own memory."""
    return torch.cuda.Stream(device)


def require_capturable(compute: Callable[[], Tensor]) -> None:
    """Compute once, and refuse what a graph can't contain.

    `torch.cuda.set_sync_debug_mode` is no alternative: it holds for all threads, also for one that
    writes a checkpoint and has to wait for the GPU.

    Raises:
        ReplayError: an operator makes the host wait for the GPU, or draws random numbers.
    """
    with TraceRecorder():
        compute()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python from freeing graphs and streams inside the block, which would end a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
