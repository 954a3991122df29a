"""Which kind of label a step's rows have, and what has to be known of all of them at once."""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.data.examples import Example
from pipeline.data.rows.columns import Label
from pipeline.errors import ConfigError, DataError
from step2_reward.label_config import LOSSES, LabelKind, LabelSettings, Loss

logger = logging.getLogger(__name__)


MOST_CLASSES = 20
"""Whole numbers of which there are no more are taken for classes, by `labels: auto`."""


OF_LABELS = ("classes", "ordinal", "scalar")


OF_CLASSES = ("classes", "ordinal")


NEEDS = {
    "pairs": "a chosen and a rejected response",
    "ties": "a chosen and a rejected response, and `tie` where neither is better",
    "classes": "a label",
    "ordinal": "a label",
    "scalar": "a label that is a number",
    "rankings": "responses with ranks or scores",
    "steps": "steps with a label for each (prompt, steps or completions, labels)",
}


@dataclass(frozen=True)
class Labels:
    """What a step learns from, known when its rows are."""

    kind: LabelKind
    loss: Loss

    classes: tuple[str, ...] = ()
    """Names in the model's order."""

    values: tuple[float, ...] = ()
    """What each class is worth; empty where that is not known."""

    counts: tuple[int, ...] = ()
    """Training rows of each class."""

    mean: float = 0.0
    std: float = 1.0
    """Of the training rows' numbers, by which they are shifted and scaled."""

    tie_share: float = 0.0
    """Share of the training pairs that are ties, from 0 to 1."""

    @property
    def num_labels(self) -> int:
        """Outputs of the model."""
        return len(self.classes) if self.kind == "classes" else 1

    @property
    def gives_scores(self) -> bool:
        """Whether RL has a score to climb."""
        return self.kind != "classes" or bool(self.values)

    def class_of(self, example: Example) -> int:
        """The number of the row's class."""
        return self.classes.index(name_of(example.label))


def name_of(label: Label | None) -> str:
    """The name of a class: `true`, `3`, `spam`."""
    return str(label).lower() if isinstance(label, bool) else str(label)


def rows_of_kind(
    config: LabelSettings, train: Sequence[Example], held_out: Sequence[Example]
) -> tuple[list[Example], list[Example]]:
    """The rows that are of the kind that `labels` chooses, large classes thinned by `down_sample`.

    Raises:
        DataError: there are none, or they are of one class, or of one that is not listed.
    """
    kind = kind_of(config, train)
    chosen = [[row for row in rows if is_of(kind, row)] for rows in (train, held_out)]
    for rows, name in zip(chosen, ("training", "held-out"), strict=True):
        if not rows:
            raise DataError(
                f"reward.labels {kind}: no {name} row has {NEEDS[kind]}; give other rows, name"
                " their columns with --fields, or choose another kind (docs/reward_models.md)"
            )
    ours, evaluated = chosen
    left = len(train) - len(ours)
    if left:
        logger.info(
            "%d of %d rows are not of the kind %s, and are left out", left, len(train), kind
        )
    resolve(config, ours, evaluated)  # says what is wrong with them
    if kind in OF_CLASSES and config.down_sample is not None:
        ours = thinned(ours, config.down_sample)
    return ours, evaluated


def kind_of(config: LabelSettings, rows: Sequence[Example]) -> LabelKind:
    """`config.labels`; where that is auto, what the rows have."""
    if config.labels != "auto":
        return config.labels
    if any(row.steps for row in rows):
        return "steps"
    if any(row.ranks for row in rows):
        return "rankings"
    if any(row.rejected for row in rows):
        return "ties" if any(row.tie for row in rows) else "pairs"
    labels = {row.label for row in rows if row.label is not None}
    numbers = [each for each in labels if isinstance(each, int | float)]
    whole = all(isinstance(each, int) for each in numbers)
    if config.class_list or len(numbers) < len(labels) or (whole and len(labels) <= MOST_CLASSES):
        return "classes"
    return "scalar"


def is_of(kind: LabelKind, row: Example) -> bool:
    """Whether a row can be learned from as that kind; a pair is a ranked list of two."""
    if kind == "steps":
        return any(label is not None for label in row.step_labels)
    if kind in OF_LABELS:
        return row.label is not None
    return bool(row.chosen and row.rejected) and (kind != "pairs" or not row.tie)


def resolve(config: LabelSettings, train: Sequence[Example], held_out: Sequence[Example]) -> Labels:
    """What is known of the labels of rows that `rows_of_kind` gave.

    Raises:
        DataError: a label is of no class, or no number; or all are the same.
        ConfigError: settings of classes don't fit the classes, or the loss the labels.
    """
    kind = kind_of(config, train)
    loss = LOSSES[kind][0] if config.loss == "auto" else config.loss
    if loss not in LOSSES[kind]:
        raise ConfigError(
            f"reward.loss {loss} does not learn from {kind}, which the rows have; choose"
            f" {' or '.join(LOSSES[kind])}"
        )
    if kind == "ties":
        share = sum(row.tie for row in train) / len(train)
        if not share:
            raise DataError("reward.labels ties: no training row is a tie; choose labels pairs")
        return Labels(kind, loss, tie_share=share)
    if kind == "steps":
        _require_both(train)
    if kind == "scalar":
        return _of_numbers(loss, train, held_out)
    if kind not in OF_CLASSES:
        return Labels(kind, loss)
    return _of_classes(kind, loss, config, train, held_out)


def _require_both(train: Sequence[Example]) -> None:
    """Refuse steps of which none can be told from another.

    Raises:
        DataError: all are right, or all are wrong.
    """
    labels = [label for row in train for label in row.step_labels if label is not None]
    right = sum(label >= 0.5 for label in labels)
    if right in (0, len(labels)):
        raise DataError(
            f"all {len(labels)} labelled steps of the training rows are"
            f" {'right' if right else 'wrong'}; a reward model of steps needs both"
        )


def _of_numbers(loss: Loss, train: Sequence[Example], held_out: Sequence[Example]) -> Labels:
    for row in (*train, *held_out):
        if not isinstance(row.label, int | float):
            raise DataError(f"{row.origin}: label must be a number for scalar, got {row.label!r}")
        if loss == "bce" and not 0 <= row.label <= 1:
            raise DataError(
                f"{row.origin}: label is {row.label:g}, and reward.loss bce learns numbers from 0"
                " to 1; choose mse"
            )
    numbers = [float(row.label) for row in train if isinstance(row.label, int | float)]
    mean = sum(numbers) / len(numbers)
    std = math.sqrt(sum((number - mean) ** 2 for number in numbers) / len(numbers))
    if std == 0:
        raise DataError(f"all {len(numbers)} training rows have the label {mean:g}")
    return Labels("scalar", loss) if loss == "bce" else Labels("scalar", loss, mean=mean, std=std)


def _of_classes(
    kind: LabelKind,
    loss: Loss,
    config: LabelSettings,
    train: Sequence[Example],
    held_out: Sequence[Example],
) -> Labels:
    rows = (*train, *held_out)
    classes = config.class_list or tuple(classes_of(rows))
    for row in rows:
        if name_of(row.label) not in classes:
            raise DataError(
                f"{row.origin}: label {name_of(row.label)} is none of the classes of"
                f" reward.class_list, {', '.join(classes)}; add it, or leave the row out"
            )
    for name in ("class_values", "class_weights"):
        if getattr(config, name) and len(getattr(config, name)) != len(classes):
            raise ConfigError(
                f"reward.{name} has {len(getattr(config, name))} numbers, and there are"
                f" {len(classes)} classes: {', '.join(classes)}"
            )
    number = Counter(name_of(row.label) for row in train)
    if len(number) < 2:
        raise DataError(
            f"all {len(train)} training rows are of the class {next(iter(number))}; a classifier"
            " needs rows of two classes or more"
        )
    counts = tuple(number[name] for name in classes)
    missing = [name for name, count in zip(classes, counts, strict=True) if not count]
    if missing:
        logger.warning("no training row is of the class %s", ", ".join(missing))
    return Labels(kind, loss, classes, config.class_values or _own_values(classes, rows), counts)


def classes_of(rows: Sequence[Example]) -> list[str]:
    """The classes that rows have: numbers, false and true in ascending order, else names."""
    labels = {name_of(row.label): row.label for row in rows}
    if any(isinstance(label, str) for label in labels.values()):
        return sorted(labels)
    return sorted(labels, key=lambda name: float(labels[name] or 0))


def _own_values(classes: Sequence[str], rows: Sequence[Example]) -> tuple[float, ...]:
    labels = {name_of(row.label): row.label for row in rows}
    found = [labels.get(name) for name in classes]
    numbers = tuple(float(label) for label in found if isinstance(label, int | float))
    return numbers if len(numbers) == len(classes) else ()


def thinned(rows: Sequence[Example], ratio: float) -> list[Example]:
    """The rows with at most `ratio` times as many of each class as of the rarest.

    Rows come in drawn order, of which a class keeps the first.
    """
    counts = Counter(name_of(row.label) for row in rows)
    most = math.ceil(ratio * min(counts.values()))
    seen: Counter[str] = Counter()
    kept: list[Example] = []
    for row in rows:
        name = name_of(row.label)
        seen[name] += 1
        if seen[name] <= most:
            kept.append(row)
    if len(kept) < len(rows):
        logger.info(
            "down_sample %g: trains on %d of %d rows, at most %d of a class",
            *(ratio, len(kept), len(rows), most),
        )
    return kept
