"""Decoding passes, first by the model's modules, then replayed from CUDA graphs or traces.

A graph is one launch instead of hundreds. It reads tokens, cache indices, lengths and pages of the
sequences from GPU memory, which is filled before each replay. Passes are padded to more rows, so
that few graphs or traces serve all batches.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from inference.engine.cache import PADDING_INDEX, DecodeAttention, count_pages
from inference.engine.replay import (
    Column,
    Pass,
    PassCounts,
    ReplayedRows,
    ReplayError,
    ReplayStage,
    TracedRows,
    TraceRecorder,
)
from inference.tensor_parallel import Sharding, get_tp_group
from pipeline.kernels.choice import kernel_mode
from pipeline.kernels.decode_attention import PAGE, find_kernel
from pipeline.kernels.linear import has_kernel
from pipeline.models.forward.attention import round_up
from pipeline.models.forward.forward import base_model

logger = logging.getLogger(__name__)


MAX_POW2_ROWS = 64
"""Up to this number, rows are padded to a power of two; beyond it, to a multiple of `ROW_STEP`."""

ROW_STEP = 32

MAX_ROW_RATIO = 4
"""Maximum ratio of a replayed pass's rows to the rows that it needs: the padding costs less than
recording a narrower pass, for which the modules run several times."""

MIN_GRAPH_LENGTH = 256
"""Sequences up to this length share a graph; beyond it there is a graph per power of two, because a
graph partitions its work by the longest sequence."""

Capture = Callable[[Callable[[], Tensor], Tensor], Callable[[], Tensor]]
"""Takes a computation and the memory of its inputs; returns a function that repeats the computation
and returns its result, always in the same memory."""

Agree = Callable[[bool], bool]
"""Returns whether all processes of the tensor-parallel group passed True; all must call it."""


class GraphAttention(DecodeAttention):
    """Attention with lengths in GPU memory: one graph serves all lengths up to `longest`."""

    is_on_device = True

    def __init__(self, num_rows: int, longest: int, device: torch.device) -> None:
        table = np.zeros((num_rows, count_pages(longest)), np.int32)
        super().__init__([longest], table, device)
        self.ends: Int[Tensor, " N"] = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.table: Int[Tensor, "N L"] = torch.from_numpy(table).to(device, copy=True)

    def device_tables(self, count: int) -> tuple[Int[Tensor, " N"], Int[Tensor, "N L"]]:
        """Return the lengths and pages of `count` rows."""
        return self.ends[:count], self.table[:count]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:  # noqa: ANN401
        """Compute attention with the kernel.

        Raises:
            ReplayError: no kernel supports the model on this GPU.
        """
        if query.is_cuda and find_kernel(query[0].transpose(0, 1), key, value) is None:
            raise ReplayError("no attention kernel supports the model")
        return super().attend(query, key, value, **settings)


class GraphedRows(ReplayedRows):
    """Graph-replayed passes with a fixed number of rows, for sequences of up to `longest` tokens.

    The graphs of a tensor-parallel model contain its collectives. All processes replay graphs or
    none does, because a process that verifies a pass computes it twice.
    """

    def __init__(
        self,
        forward: Pass,
        num_rows: int,
        *,
        longest: int,
        device: torch.device,
        capture: Capture,
        agree: Agree,
    ) -> None:
        super().__init__(num_rows)
        self._forward = forward
        # Per row: token, position, index in the cache, and sequence length.
        self._host_inputs: Int[Tensor, "4 N"] = torch.zeros(
            4, num_rows, dtype=torch.long, pin_memory=device.type == "cuda"
        )
        self._inputs = self._host_inputs.to(device, copy=True)
        self._layout = GraphAttention(num_rows, longest, device)
        self._host_pages = torch.zeros_like(
            self._layout.table, device="cpu", pin_memory=device.type == "cuda"
        )
        self.longest = longest
        self._capture = capture
        self._agree = agree
        self._graph: Callable[[], Tensor] | None = None

    def _load_inputs(self, columns: Sequence[Column], layout: DecodeAttention) -> None:
        padding = [0] * (len(columns) - len(layout.lengths))
        # The last pass's tokens have been read, so its copies from these buffers have finished.
        self._host_inputs[:3] = torch.tensor(columns).T
        self._host_inputs[3] = torch.tensor([*layout.lengths, *padding])
        self._inputs.copy_(self._host_inputs, non_blocking=True)
        pages = torch.from_numpy(layout.pages[:, : self._host_pages.shape[1]])
        self._host_pages[: len(pages), : pages.shape[1]] = pages
        self._layout.table.copy_(self._host_pages, non_blocking=True)

    def _run_modules(self) -> Float[Tensor, "N V"]:
        self._layout.ends.copy_(self._inputs[3])
        return self._forward(self._inputs[:3], self._layout)

    def _record(self) -> Float[Tensor, "N V"]:
        logits = self._run_modules()  # a graph is used only once verified
        with self._on_all_processes():
            self._graph = self._capture(self._run_modules, self._inputs)
        return logits

    def _verify(self, num_sequences: int) -> Float[Tensor, "N V"]:
        with self._on_all_processes():
            return super()._verify(num_sequences)

    @contextmanager
    def _on_all_processes(self) -> Iterator[None]:
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

    repeat = _replay

    def advance(self, tokens: Int[Tensor, " B"], increments: Int[Tensor, " B"]) -> None:
        """Set the next tokens of the first rows on the device, and advance their positions."""
        ids, positions, indices, lengths = self._inputs[:, : len(tokens)]
        # A row at its limit repeats its last pass.
        ids.copy_(torch.where(increments > 0, tokens, ids))
        positions += increments
        lengths += increments
        table = self._layout.table[: len(tokens)]
        # After the last pass that fits, the position may be past the table.
        last = (positions // PAGE).clamp(max=table.shape[1] - 1)
        indices.copy_(table.gather(1, last[:, None])[:, 0] * PAGE + positions % PAGE)


class CudaCapture:
    """Captures passes of one model into CUDA graphs that share their memory.

    Only one graph runs at a time, and no result is read after the next replay.
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
            ReplayError: the modules do something that a graph can't contain.
        """
        graph = torch.cuda.CUDAGraph()
        current, side = torch.cuda.current_stream(self._device), capture_stream(self._device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            # First run without capture: a failed capture would leave the allocator inconsistent.
            # This also allocates cuBLAS's workspace for this stream outside the graph's pool.
            with TraceRecorder():
                compute()
            was_enabled = gc.isenabled()
            gc.disable()  # freeing graphs or streams would invalidate the capture
            try:
                # Other threads, such as a checkpoint's, may use the GPU during the capture.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = compute()
                finally:
                    graph.capture_end()
            finally:
                if was_enabled:
                    gc.enable()
        current.wait_stream(side)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the GPU's only capture stream; additional streams would hold separate memory."""
    return torch.cuda.Stream(device)


class Decoder:
    """Decodes one token of each running sequence at a time.

    Args:
        forward: runs a pass through the model's modules.
        model: the model.
        device: the model's device.
        counts: counts the passes.
        agree: see `Agree`.
        capture: records passes; by default, as CUDA graphs on a GPU and as traces on a CPU.
    """

    def __init__(
        self,
        forward: Pass,
        *,
        model: nn.Module,
        device: torch.device,
        counts: PassCounts,
        agree: Agree = bool,
        capture: Capture | None = None,
    ) -> None:
        self._forward = forward
        self._dtype: torch.dtype = base_model(model).dtype
        self._device = device
        self._replay_enabled = can_replay(model, device)
        if capture is None and self._replay_enabled and device.type == "cuda":
            capture = CudaCapture(device)
        self._capture = capture
        self._recorded: dict[tuple[int, int], ReplayedRows] = {}
        """Recorded passes by number of rows and longest sequence."""
        self._counts = counts
        self._agree = agree
        self.replayed: GraphedRows | None = None
        """The rows that replayed the last pass from a graph, if it was replayed."""

    def __call__(
        self, columns: Sequence[Column], layout: DecodeAttention, *, allow_replay: bool
    ) -> Float[Tensor, "B V"]:
        """Return the logits after each token.

        Args:
            columns: token, position and cache index of each row.
            layout: attention of the rows.
            allow_replay: whether the pass may be recorded or replayed.
        """
        count, self.replayed = len(columns), None
        padding = (columns[-1][0], 0, PADDING_INDEX)
        if self._replay_enabled and allow_replay:
            rows = self._select_rows(count, max(layout.lengths))
            is_replay = rows.stage is ReplayStage.REPLAY
            try:
                logits = rows.run([*columns, *[padding] * (rows.num_rows - count)], layout)[:count]
            except ReplayError as reason:
                _log_once(str(reason))
                self._counts.failed_recordings += 1
                self._replay_enabled = False
                self._recorded.clear()
            else:
                if is_replay and isinstance(rows, GraphedRows):
                    self.replayed = rows
                self._counts.replayed += is_replay
                self._counts.eager += not is_replay
                return logits
        self._counts.eager += 1
        inputs = torch.tensor(columns).T.contiguous()
        return self._forward(inputs.to(self._device), layout)

    def _select_rows(self, count: int, longest: int) -> ReplayedRows:
        """Return the passes for `count` sequences of at most `longest` tokens."""
        num_rows = power_of_two(count) if count <= MAX_POW2_ROWS else round_up(count, ROW_STEP)
        longest = 0 if self._capture is None else max(MIN_GRAPH_LENGTH, power_of_two(longest))
        key = num_rows, longest
        if key not in self._recorded:
            wider = self._find_wider(*key)
            if wider is not None:
                return wider
            self._recorded[key] = self._new_rows(num_rows, longest)
        return self._recorded[key]

    def _find_wider(self, num_rows: int, longest: int) -> ReplayedRows | None:
        """Return the narrowest wider pass that is verified and within `MAX_ROW_RATIO`, if any."""
        if self._device.type == "cpu" and not (kernel_mode() != "off" and has_kernel(self._dtype)):
            return None  # PyTorch would compute the padding too
        candidates = [
            rows
            for (width, length), rows in self._recorded.items()
            if num_rows < width <= MAX_ROW_RATIO * num_rows
            and length == longest
            and rows.stage is ReplayStage.REPLAY
        ]
        return min(candidates, key=lambda rows: rows.num_rows, default=None)

    def _new_rows(self, num_rows: int, longest: int) -> ReplayedRows:
        if self._capture is None:
            return TracedRows(self._forward, num_rows)
        return GraphedRows(
            self._forward,
            num_rows,
            longest=longest,
            device=self._device,
            capture=self._capture,
            agree=self._agree,
        )


def can_replay(model: nn.Module, device: torch.device) -> bool:
    """Return whether decoding passes can be replayed without the modules.

    Hooks must run in every pass, except those of tensor parallelism on GPUs: a CUDA graph can
    contain their collectives, whereas an operator trace on a CPU can't.
    """
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())  # noqa: SLF001
    ]
    if get_tp_group(base_model(model)).size > 1 and device.type == "cpu":
        return False
    return all(isinstance(getattr(hook, "__self__", None), Sharding) for hook in hooks)


@cache
def _log_once(reason: str) -> None:
    logger.info("decoding in eager mode, without replay: %s", reason)


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
