"""Decoding passes: by the model's modules at first, then replayed from traces or graphs.

A pass has more rows than needed, so that few traces or graphs serve all batches.
"""

import logging
from collections.abc import Sequence
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor, nn

from inference.engine.cache import NextToken
from inference.engine.graphs import Agree, Capture, CudaCapture, GraphedRows
from inference.engine.replay import (
    Column,
    Pass,
    PassCounts,
    ReplayedRows,
    ReplayError,
    Stage,
    TracedRows,
)
from inference.tensor_parallel import is_of_sharding, tp_group_of
from pipeline.kernels.choice import kernel_mode
from pipeline.kernels.linear import is_built
from pipeline.models.attention import round_up
from pipeline.models.forward import base_model

logger = logging.getLogger(__name__)

MANY = 64
"""Up to this number of rows, passes have powers of two; beyond it multiples of `STEP`."""

STEP = 32

WIDER = 4
"""Verified passes with up to this many times the rows serve fewer rows: padding costs less than
three more passes of the modules' Python code."""

SHORT = 256
"""Up to this length sequences share a graph; longer ones have graphs by powers of two, because a
graph divides its work among the processors of a GPU by its longest sequence."""


class Decoder:
    """Decodes one token of each running sequence at a time.

    Args:
        modules: a pass through the model.
        model: the model.
        device: its device.
        counts: counts the passes.
        agree: see `Agree`.
        capture: records passes; by default CUDA graphs on a GPU, traces on a CPU.
    """

    def __init__(
        self,
        modules: Pass,
        *,
        model: nn.Module,
        device: torch.device,
        counts: PassCounts,
        agree: Agree = bool,
        capture: Capture | None = None,
    ) -> None:
        self._modules = modules
        self._dtype: torch.dtype = base_model(model).dtype
        self._device = device
        self._replays = can_replay(model, device)
        if capture is None and self._replays and device.type == "cuda":
            capture = CudaCapture(device)
        self._capture = capture
        self._kept: dict[tuple[int, int], ReplayedRows] = {}
        """By number of rows and longest sequence."""
        self._counts = counts
        self._agree = agree

    def __call__(
        self, columns: Sequence[Column], layout: NextToken, *, spare: int
    ) -> Float[Tensor, "B V"]:
        """Return the logits after each token.

        Args:
            columns: token, position and place in the cache of each row.
            layout: attention of the rows.
            spare: the place in the cache for padding.
        """
        count = len(columns)
        padding = (columns[-1][0], 0, spare)
        if self._replays:
            rows = self._rows(count, max(layout.lengths))
            is_replay = rows.stage is Stage.REPLAY
            try:
                logits = rows.run([*columns, *[padding] * (rows.num_rows - count)], layout)[:count]
            except ReplayError as reason:
                _log_once(str(reason))
                self._counts.refused += 1
                self._replays = False
                self._kept.clear()
            else:
                self._counts.replayed += is_replay
                self._counts.by_modules += not is_replay
                return logits
        self._counts.by_modules += 1
        inputs = torch.tensor(columns).T.contiguous()
        return self._modules(inputs.to(self._device), layout)

    def _rows(self, count: int, longest: int) -> ReplayedRows:
        """The passes for `count` sequences of at most `longest` tokens."""
        num_rows = power_of_two(count) if count <= MANY else round_up(count, STEP)
        longest = 0 if self._capture is None else max(SHORT, power_of_two(longest))
        key = num_rows, longest
        if key not in self._kept:
            wider = self._wider(*key)
            if wider is not None:
                return wider
            self._kept[key] = self._new_rows(num_rows, longest)
        return self._kept[key]

    def _wider(self, num_rows: int, longest: int) -> ReplayedRows | None:
        """The verified passes with the fewest rows, if not too many more."""
        if self._device.type == "cpu" and not (kernel_mode() != "off" and is_built(self._dtype)):
            return None  # PyTorch multiplies padding as well
        found = [
            rows
            for (wide, length), rows in self._kept.items()
            if num_rows < wide <= WIDER * num_rows
            and length == longest
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


def can_replay(model: nn.Module, device: torch.device) -> bool:
    """Whether decoding passes can be repeated without the modules.

    Hooks must run in every pass, except those of tensor parallelism on GPUs, whose collectives are
    part of a graph; a trace of a CPU's operators has none.
    """
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())  # noqa: SLF001
    ]
    if tp_group_of(base_model(model)).size > 1 and device.type == "cpu":
        return False
    return all(is_of_sharding(hook) for hook in hooks)


@cache
def _log_once(reason: str) -> None:
    logger.info("decoding runs the model's modules in each pass: %s", reason)


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()
