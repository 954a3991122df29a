"""Reports truncated rows, and rows with nothing left to train on, before a step trains."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pipeline.config import EMBEDDED, DataConfig
from pipeline.system.errors import DataError

logger = logging.getLogger(__name__)

LOOKED_AT = 2048
"""Maximum number of rows that are encoded for counts; these are the first in random order."""

LOOKED_AT_EMBEDDED = 128
"""The same for the built-in task, whose rows are all alike."""

AT_ONCE = 64
"""Rows encoded at a time to find one with a target."""

Row = TypeVar("Row")


@dataclass(frozen=True)
class Fit:
    """How one row fits into `max_length`."""

    is_cut: bool

    num_targets: int
    """Number of remaining targets: tokens, labelled steps, or 1 for a pair that still differs."""


@dataclass(frozen=True)
class RowsFit(Generic[Row]):
    """How a step's rows fit, and how messages describe it."""

    fit: Callable[[Sequence[Row]], Sequence[Fit]]
    """Function that returns how rows fit, encoded and truncated as the step does."""

    end: str
    """The side that a truncated row loses: "end" or "beginning"."""

    empty: str
    """Description of rows without targets: "have nothing left to train on"."""

    rows: str = "rows"
    """The word for the rows in messages: "rows" or "pairs"."""


def require_learnable(
    train: Sequence[Row], held_out: Sequence[Row], how: RowsFit[Row], data: DataConfig
) -> None:
    """Check that some training row and some evaluation row has something to train on.

    Raises:
        DataError: no training row, or no evaluation row, has a target.
    """
    for name, examples in (("training", train), ("evaluation", held_out)):
        pieces = (examples[n : n + AT_ONCE] for n in range(0, len(examples), AT_ONCE))
        if not any(fit.num_targets for piece in pieces for fit in how.fit(piece)):
            raise DataError(
                f"all {len(examples)} {name} {how.rows} {how.empty} at data.max_length"
                f" {data.max_length}; raise it, or inspect the rows with `python -m"
                " pipeline.data.inspect`"
            )


def report_lengths(
    examples: Sequence[Row], how: RowsFit[Row], data: DataConfig, *, name: str
) -> None:
    """Log how many rows are truncated and how many have no target.

    Args:
        examples: the rows, in random order.
        how: how rows fit into `max_length`, and the wording of messages.
        data: the settings with which they are read and truncated.
        name: name of the rows, such as "training rows".
    """
    looked_at = examples[: LOOKED_AT_EMBEDDED if EMBEDDED in data.path else LOOKED_AT]
    fits = how.fit(looked_at)
    num_cut = sum(fit.is_cut for fit in fits)
    num_empty = sum(fit.num_targets == 0 for fit in fits)
    longer = f"are longer than data.max_length {data.max_length} and lose their {how.end}"
    counts = {longer: num_cut, how.empty: num_empty}
    facts = [f"{count} {what}" for what, count in counts.items() if count]
    of = f"{len(examples)} {name}"
    if len(looked_at) < len(examples):
        of = f"{len(looked_at)} of {len(examples)} {name}, which were inspected"
    if facts:
        logger.info("of %s, %s", of, ", and ".join(facts))
