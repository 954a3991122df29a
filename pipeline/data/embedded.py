"""Rows of the embedded task as examples."""

from collections.abc import Sequence
from functools import lru_cache

from pipeline.data.examples import Example, Message
from pipeline.demo.task import TaskRow, pair_rows, stage_rows

COLUMNS = ("answer",)
"""Columns of step 3's rows: the right sentence."""

Examples = tuple[list[Example], list[Example]]


@lru_cache(maxsize=6)
def stage_examples(*, step: int, seed: int) -> Examples:
    """Training and evaluation rows of a step; the lists are shared and must not be changed."""
    train, held_out = stage_rows(step=step, seed=seed)
    return _examples(train), _examples(held_out)


@lru_cache(maxsize=6)
def pair_examples(*, of_steps: tuple[int, ...], seed: int) -> Examples:
    """Training and evaluation pairs with the prompts of these steps."""
    train, held_out = pair_rows(of_steps=of_steps, seed=seed)
    return _examples(train), _examples(held_out)


def _examples(rows: Sequence[TaskRow]) -> list[Example]:
    return [
        Example(
            prompt=(Message("user", row.prompt),),
            chosen=_turns(row.chosen),
            rejected=_turns(row.rejected),
            origin="embedded task",
            extra={} if row.chosen else {"answer": row.answer},
        )
        for row in rows
    ]


def _turns(response: str) -> tuple[Message, ...]:
    return (Message("assistant", response),) if response else ()
