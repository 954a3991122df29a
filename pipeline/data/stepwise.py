"""Responses in steps, and what is known of each step: the rows of process reward models."""

import math
from collections.abc import Callable

from pipeline.data.dialogues import Turns
from pipeline.data.examples import Example
from pipeline.data.sources import Row
from pipeline.data.turns import EMPTY_RESPONSE, NO_ANSWER, LeftOut, prompt
from pipeline.errors import DataError

NEEDS = (("prompt", "completions", "labels"), ("prompt", "steps", "labels"), ("prompt", "steps"))
"""Columns of TRL's stepwise rows; the same with another name; steps with their labels in them."""

RATINGS = {-1: 0.0, 0: 1.0, 1: 1.0}
"""Of PRM800K: wrong, neutral, right; what is neutral counts as right (Lightman et al. 2023)."""


def stepwise_reader(name: str) -> Callable[[Row], Example]:
    """What reads rows whose steps are in the column `name`.

    A row has a prompt alone for whoever doesn't learn from steps: a response with wrong steps is
    not a demonstration.
    """

    def read(row: Row) -> Example:
        question: Turns = prompt(row)
        if not question or question[-1].role != "user":
            raise LeftOut(NO_ANSWER)
        texts, labels = _steps(row, name)
        if not texts:
            raise LeftOut(EMPTY_RESPONSE)
        return Example(question, steps=texts, step_labels=labels)

    return read


def _steps(row: Row, name: str) -> tuple[tuple[str, ...], tuple[float | None, ...]]:
    """The steps that hold text, and their labels."""
    steps = row.columns[name]
    if not isinstance(steps, list):
        raise DataError(f"{row.origin}: {name} must be a list of steps, got {_kind(steps)}")
    if "labels" in row.columns:
        labels = row.columns["labels"]
        if not isinstance(labels, list) or len(labels) != len(steps):
            count = len(labels) if isinstance(labels, list) else _kind(labels)
            raise DataError(
                f"{row.origin}: {name} has {len(steps)} steps, and labels {count}; give one label"
                " for each step, null where none is known"
            )
        texts = steps
    else:
        texts = [_inside(row, name, step, "text") for step in steps]
        labels = [_label_inside(row, name, step) for step in steps]
    kept: list[tuple[str, float | None]] = []
    for text, label in zip(texts, labels, strict=True):
        if not isinstance(text, str):
            raise DataError(f"{row.origin}: a step in {name} must be text, got {_kind(text)}")
        known = _label(row, label)
        if text.strip():
            kept.append((text, known))
    return tuple(text for text, _ in kept), tuple(label for _, label in kept)


def _inside(row: Row, name: str, step: object, key: str) -> object:
    if not isinstance(step, dict) or key not in step:
        raise DataError(
            f'{row.origin}: without a column labels, {name} must be a list of {{"text": ...,'
            f' "label": ...}}, got {str(step)[:60]}'
        )
    return step[key]


def _label_inside(row: Row, name: str, step: object) -> object:
    if isinstance(step, dict) and "rating" in step:
        rating = step["rating"]
        if rating is None:
            return None
        if isinstance(rating, bool) or rating not in RATINGS:
            raise DataError(f"{row.origin}: rating must be -1, 0 or 1 or null, got {rating!r}")
        return RATINGS[rating]
    return _inside(row, name, step, "label")


def _label(row: Row, value: object) -> float | None:
    """How right a step is, from 0 to 1; None where that is not known."""
    if value is None:
        return None
    is_share = isinstance(value, int | float) and math.isfinite(value) and 0 <= value <= 1
    if not is_share:
        raise DataError(
            f"{row.origin}: the label of a step must be true, false or a number from 0 to 1, or"
            f" null where none is known, got {value!r}"
        )
    return float(value)  # pyright: ignore[reportArgumentType]  # a number, as is checked above


def _kind(value: object) -> str:
    return type(value).__name__
