"""Rows that are cut, and rows with nothing left to train on: reported before a step trains.

Where no row has anything to learn a run is refused before its first step, by `require_learnable`.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from pipeline.config import EMBEDDED, DataConfig
from pipeline.parallel.mesh import current_mesh
from pipeline.system.errors import DataError

logger = logging.getLogger(__name__)

LOOKED_AT = 2048
"""Rows that are encoded to count; of more, the first that many, which come in random order."""

LOOKED_AT_EMBEDDED = 128
"""The same number for the built-in task, whose rows are all alike."""

AT_ONCE = 64
"""Rows that are encoded at a time to find one with something to learn."""

Row = TypeVar("Row")


@dataclass(frozen=True)
class Fit:
    """How one row fits into `max_length`."""

    is_cut: bool

    num_targets: int
    """What is left to learn: tokens that step 1 trains, 1 for a pair that still differs."""


@dataclass(frozen=True)
class RowsFit(Generic[Row]):
    """How the rows of a step fit, and how messages speak of them."""

    fit: Callable[[Sequence[Row]], Sequence[Fit]]
    """As the step encodes and cuts them."""

    end: str
    """Which end a row that is cut loses: "end" or "beginning"."""

    empty: str
    """How rows that teach nothing are described: "have nothing left to train on"."""

    rows: str = "rows"
    """What they are called: "rows" or "pairs"."""


def require_learnable(
    train: Sequence[Row], held_out: Sequence[Row], how: RowsFit[Row], data: DataConfig
) -> None:
    """Return if there is a row to train on and one to evaluate, at the first of each.

    Raises:
        DataError: no training row, or no evaluation row, has anything to learn.
    """
    for name, examples in ((f"training {how.rows}", train), (f"evaluation {how.rows}", held_out)):
        first, rest = examples[:AT_ONCE], examples[AT_ONCE:]
        if not _any_targets(first, how) and not _any_targets(rest, how):
            raise _nothing_to_learn(examples, how, data, name)


def check_lengths(
    examples: Sequence[Row], how: RowsFit[Row], data: DataConfig, *, name: str
) -> None:
    """Say how many rows are cut and how many teach nothing; all processes call it together.

    Args:
        examples: the rows, in random order.
        how: they fit.
        data: the settings they were read and are cut by.
        name: of the rows: "training rows".

    Raises:
        DataError: no row has anything to learn.
    """
    most = LOOKED_AT_EMBEDDED if EMBEDDED in data.path else LOOKED_AT
    looked_at = examples[:most]
    world = current_mesh().world
    fits = how.fit(world.share(looked_at))
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
    if targets == 0 and not _any_targets(examples[most:], how):
        raise _nothing_to_learn(examples, how, data, name)
    if not num_cut and not num_empty:
        return
    of = f"{len(examples)} {name}"
    if len(looked_at) < len(examples):
        of = f"the {len(looked_at)} {name} looked at, of {len(examples)},"
    cut = f"{num_cut} of {of} are longer than {data.max_length} tokens and lose their {how.end}"
    logger.info("%s; %d of them %s", cut, num_empty, how.empty)


def _nothing_to_learn(
    examples: Sequence[Row], how: RowsFit[Row], data: DataConfig, name: str
) -> DataError:
    return DataError(
        f"all {len(examples)} {name} {how.empty} at data.max_length {data.max_length}; raise it, or"
        " see what is trained with `python -m pipeline.data.inspect`"
    )


def _any_targets(examples: Sequence[Row], how: RowsFit[Row]) -> bool:
    """Whether any row of any process has something to learn."""
    world = current_mesh().world
    own = iter(world.share(examples))
    found = False
    while not found and (part := list(islice(own, AT_ONCE))):
        found = any(each.num_targets for each in how.fit(part))
    return bool(world.sum(found))
