"""Report truncated rows, and rows with nothing left to train on, before a step trains."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pipeline.config import EMBEDDED, DataConfig
from pipeline.system.errors import DataError

logger = logging.getLogger(__name__)

MAX_ENCODED_ROWS = 2048
"""Maximum number of rows that are encoded to count truncated ones: the first in random order."""

MAX_ENCODED_EMBEDDED_ROWS = 128
"""The same maximum for the embedded task, whose rows are all similar."""

BATCH_ROWS = 64
"""Number of rows encoded at a time to find one with a target."""

Row = TypeVar("Row")


@dataclass(frozen=True)
class RowFit:
    """How one row fits into `max_length`."""

    is_truncated: bool

    num_targets: int
    """Number of remaining targets: tokens, labeled steps, or 1 for a pair that still differs."""


@dataclass(frozen=True)
class FitCheck(Generic[Row]):
    """How to check whether a step's rows fit into `max_length`, and the words for messages."""

    fit: Callable[[Sequence[Row]], Sequence[RowFit]]
    """Function that reports how rows fit when encoded and truncated as in the step."""

    lost_side: str
    """The side that a truncated row loses: "end" or "beginning"."""

    empty: str
    """Verb phrase for rows without targets, such as "have nothing left to train on"."""

    rows: str = "rows"
    """The word for the rows in messages: "rows" or "pairs"."""


def require_targets(
    train: Sequence[Row], held_out: Sequence[Row], check: FitCheck[Row], data: DataConfig
) -> None:
    """Check that at least one training row and one evaluation row have a target.

    Raises:
        DataError: no training row, or no evaluation row, has a target.
    """
    for name, examples in (("training", train), ("evaluation", held_out)):
        starts = range(0, len(examples), BATCH_ROWS)
        batches = (examples[start : start + BATCH_ROWS] for start in starts)
        if not any(fit.num_targets for batch in batches for fit in check.fit(batch)):
            raise DataError(
                f"all {len(examples)} {name} {check.rows} {check.empty} at data.max_length"
                f" {data.max_length}; raise this limit, or inspect the rows with `python -m"
                " pipeline.data.inspect`"
            )


def report_lengths(
    examples: Sequence[Row], check: FitCheck[Row], data: DataConfig, *, name: str
) -> None:
    """Log how many rows are truncated or have no target; rows must be in random order.

    `name` describes the rows in the message, such as "training rows".
    """
    inspected = examples[: MAX_ENCODED_EMBEDDED_ROWS if EMBEDDED in data.path else MAX_ENCODED_ROWS]
    fits = check.fit(inspected)
    num_truncated = sum(fit.is_truncated for fit in fits)
    num_empty = sum(fit.num_targets == 0 for fit in fits)
    longer = f"are longer than data.max_length {data.max_length} and lose their {check.lost_side}"
    counts = {longer: num_truncated, check.empty: num_empty}
    facts = [f"{count} {reason}" for reason, count in counts.items() if count]
    population = f"{len(examples)} {name}"
    if len(inspected) < len(examples):
        population = f"{len(inspected)} inspected {check.rows} ({len(examples)} {name} in total)"
    if facts:
        logger.info("of %s, %s", population, ", and ".join(facts))
