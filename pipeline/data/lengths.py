"""Rows that are cut, and rows with nothing left to train on: reported before a step trains."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from pipeline.config import EMBEDDED, DataConfig
from pipeline.errors import DataError
from pipeline.parallel.mesh import current_mesh

logger = logging.getLogger(__name__)

LOOKED_AT = 2048
"""Rows that are encoded to count; of more, the first that many, which come in random order."""

LOOKED_AT_EMBEDDED = 128
"""Of the built-in task, whose rows are all alike."""

Row = TypeVar("Row")


@dataclass(frozen=True)
class Fit:
    """How one row fits into `max_length`."""

    is_cut: bool

    num_targets: int
    """What is left to learn: tokens that step 1 trains, 1 for a pair that still differs."""


def check_lengths(
    examples: Sequence[Row],
    fit: Callable[[Sequence[Row]], Sequence[Fit]],
    data: DataConfig,
    *,
    name: str,
    end: str,
    empty: str,
) -> None:
    """Say how many rows are cut and how many teach nothing; all processes call it together.

    Args:
        examples: the rows, in random order.
        fit: how rows fit, as the step encodes and cuts them.
        data: the settings they were read and are cut by.
        name: of the rows: "training rows".
        end: which end a row that is cut loses: "end" or "beginning".
        empty: how rows that teach nothing are described: "have nothing left to train on".

    Raises:
        DataError: no row has anything to learn.
    """
    most = LOOKED_AT_EMBEDDED if EMBEDDED in data.path else LOOKED_AT
    looked_at = examples[:most]
    world = current_mesh().world
    fits = fit(world.share(looked_at))
    num_cut, num_empty, targets = map(
        int,
        world.sums(
            [
                sum(each.is_cut for each in fits),
                sum(each.num_targets == 0 for each in fits),
                sum(each.num_targets for each in fits),
            ]
        ),
    )
    if targets == 0 and not _any_targets(examples[most:], fit):
        raise DataError(
            f"all {len(examples)} {name} {empty} at data.max_length {data.max_length}; raise it, or"
            " see what is trained with `python -m pipeline.data.inspect`"
        )
    if not num_cut and not num_empty:
        return
    of = f"{len(examples)} {name}"
    if len(looked_at) < len(examples):
        of = f"the {len(looked_at)} {name} looked at, of {len(examples)},"
    cut = f"{num_cut} of {of} are longer than {data.max_length} tokens and lose their {end}"
    logger.info("%s; %d of them %s", cut, num_empty, empty)


def _any_targets(examples: Sequence[Row], fit: Callable[[Sequence[Row]], Sequence[Fit]]) -> bool:
    """Whether any row of any process has something to learn."""
    world = current_mesh().world
    own = iter(world.share(examples))
    found = False
    while not found and (part := list(islice(own, 64))):
        found = any(each.num_targets for each in fit(part))
    return bool(world.sum(found))
