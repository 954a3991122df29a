"""Decoding passes: through the model's modules, and soon from what was kept of what they do.

A pass has more rows than it needs, so that few traces or graphs serve all batches; what a row says
does not depend on the others.
"""

import logging
from collections.abc import Sequence
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from inference.engine.graphs import Agree, Capture, CudaCapture, GraphedRows
from inference.engine.pieces import NextTokenAndPieces, StepLayout
from inference.engine.replay import (
    Column,
    Pass,
    PassCounts,
    ReplayedRows,
    ReplayError,
    Stage,
)
from inference.engine.traced import TracedRows
from pipeline.kernels.choice import kernel_mode
from pipeline.kernels.linear.dispatch import is_built
from pipeline.models.attention import round_up

logger = logging.getLogger(__name__)

MANY = 64
"""Up to so many rows there are passes of powers of two; beyond it more padding would cost more than
more traces or graphs."""

STEP = 32
"""Passes of more rows are multiples of this."""

WIDER = 4
"""Passes of up to so many times as many rows serve fewer once they are verified: rows that nobody
asks for cost less than the modules' Python does three more times."""

SHORT = 256
"""Up to so many tokens lengths share a graph; longer ones have graphs by powers of two. Work is
divided among the processors of a GPU by the longest length that a graph may meet."""


Kind = tuple[bool, bool]
"""Of a pass, besides its size: whether it has pieces of prompts, and rows with adapters."""


class Decoder:
    """Decodes one token of each running sequence at a time.

    Args:
        modules: a pass through the model.
        dtype: of the model.
        device: of the model.
        replays: whether passes may be repeated without the modules: those whose Python does more
            than compute, with other processes or for somebody who watches, must run each time.
        counts: where passes are counted.
        agree: of the processes that compute each layer together.
        capture: what keeps passes; None is CUDA graphs on a GPU, traces on a CPU.
    """

    def __init__(
        self,
        modules: Pass,
        *,
        dtype: torch.dtype,
        device: torch.device,
        replays: bool,
        counts: PassCounts,
        agree: Agree = bool,
        capture: Capture | None = None,
    ) -> None:
        self._modules = modules
        self._dtype = dtype
        self._device = device
        self._replays = replays
        if capture is None and replays and device.type == "cuda":
            capture = CudaCapture(device)
        self._capture = capture
        self._kept: dict[tuple[int, int, Kind], ReplayedRows] = {}
        self._counts = counts
        self._agree = agree

    def __call__(
        self, columns: Sequence[Column], layout: StepLayout, *, spare: int
    ) -> Float[Tensor, "B V"]:
        """The logits after each token, or after the first ones if the layout reads no more.

        Args:
            columns: of each row the token, its position, its place in the cache, its adapter.
            layout: what each of them sees.
            spare: a place in the cache that nobody reads.
        """
        count = len(columns)
        # Padding is a token at the beginning of its own, which nobody reads.
        padding = (columns[-1][0], 0, spare, 0)
        if self._replays:
            kind = isinstance(layout, NextTokenAndPieces), has_adapters(columns)
            rows = self._rows(count, max(layout.lengths), kind)
            stage = rows.stage
            try:
                logits = rows.run([*columns, *[padding] * (rows.num_rows - count)], layout)[:count]
            except ReplayError as reason:
                _log_once(str(reason))
                self._counts.refused += 1
                self._replays = False
                self._kept.clear()
            else:
                self._count(rows, stage)
                return logits
        self._counts.by_modules += 1
        padded = [*columns, *[padding] * (self._num_rows(count) - count)]
        inputs = torch.tensor(padded).T.contiguous()
        return self._modules(inputs.to(self._device), layout)[:count]

    def _count(self, rows: ReplayedRows, stage: Stage) -> None:
        """Keep account of a pass that was at this stage."""
        if stage is Stage.REPLAY:
            self._counts.replayed += 1
            return
        self._counts.by_modules += 1
        if stage is not Stage.VERIFY:
            return
        if rows.difference == 0.0:
            self._counts.exact += 1
        else:
            self._counts.rounded += 1
        if self._capture is not None:
            _log_kept(f"{rows.difference:.0e}" if rows.difference else None)

    def _rows(self, count: int, longest: int, kind: Kind) -> ReplayedRows:
        """The passes for so many sequences, the longest of so many tokens."""
        num_rows = self._num_rows(count)
        longest = 0 if self._capture is None else max(SHORT, power_of_two(longest))
        rows = self._kept.get((num_rows, longest, kind))
        if rows is None:
            rows = self._wider(num_rows, longest, kind)
        if rows is None:
            rows = self._kept[num_rows, longest, kind] = self._new_rows(num_rows, longest)
        return rows

    def _wider(self, num_rows: int, longest: int, kind: Kind) -> ReplayedRows | None:
        """Passes of not too many more rows that are verified already, the fewest."""
        if self._device.type == "cpu" and not self._skips_padding():
            return None  # all rows are multiplied
        found = [
            rows
            for (wide, *other), rows in self._kept.items()
            if num_rows < wide <= WIDER * num_rows
            and other == [longest, kind]
            and rows.stage is Stage.REPLAY
        ]
        return min(found, key=lambda rows: rows.num_rows, default=None)

    def _new_rows(self, num_rows: int, longest: int) -> ReplayedRows:
        if self._capture is None:
            return TracedRows(self._modules, num_rows)
        return GraphedRows(
            self._modules,
            num_rows,
            longest=longest,
            device=self._device,
            capture=self._capture,
            agree=self._agree,
        )

    def _num_rows(self, count: int) -> int:
        if not self._replays:
            return count
        return power_of_two(count) if count <= MANY else round_up(count, STEP)

    def replays_rows(self, count: int) -> bool:
        """Whether passes of so many rows, pieces of prompts among them, are traced on a CPU."""
        return self._replays and self._device.type == "cpu" and count <= MANY

    def _skips_padding(self) -> bool:
        """Whether a kernel multiplies only the rows that are read."""
        return kernel_mode() != "off" and is_built(self._dtype)


def has_adapters(columns: Sequence[Column]) -> bool:
    """Whether a row has an adapter: passes in which none has are the base's own."""
    return any(column[3] for column in columns)


@cache
def _log_once(reason: str) -> None:
    logger.info("decoding goes through the model's modules each time: %s", reason)


@cache
def _log_kept(difference: str | None) -> None:
    how = f"up to rounding, by {difference} of the largest logit" if difference else "to the bit"
    logger.info("decoding goes by graphs, which repeat the model's modules %s", how)


def power_of_two(count: int) -> int:
    """The first one that is not below."""
    return 1 << (count - 1).bit_length()
