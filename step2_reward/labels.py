"""Labels of step 2: settings, kinds, and the data's classes or mean and standard deviation."""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.data.examples import Example
from pipeline.data.rows.columns import Label
from pipeline.system.errors import ConfigError, DataError, require

logger = logging.getLogger(__name__)


LabelKind = Literal["pairs", "classes", "scalar", "steps"]

Loss = Literal["bradley_terry", "focal", "cross_entropy", "mse", "bce"]

LOSSES: dict[str, tuple[Loss, ...]] = {
    "pairs": ("bradley_terry", "focal"),
    "classes": ("cross_entropy", "focal"),
    "scalar": ("mse", "bce"),
    "steps": ("bce",),
}
"""Losses for each kind of label, the default first."""


@dataclass(frozen=True, kw_only=True)
class LabelSettings:
    """Labels that a reward model is trained on."""

    labels: Literal["auto", LabelKind] = "auto"
    """Kind of the rows' labels (docs/reward_models.md): pairs, classes, numbers (scalar), or
    steps; auto detects it from the rows' columns."""

    loss: Literal["auto", Loss] = "auto"
    """The loss; auto uses the default for the kind of label. The alternatives are focal (pairs,
    classes) and bce (numbers from 0 to 1)."""

    focal_gamma: float = 2.0
    """Exponent of the focal loss: a row is weighted by (1 - p)^gamma, p being the probability of
    its label; 0 gives the unweighted loss."""

    class_list: tuple[str, ...] = ()
    """Names of the classes in the model's order; empty uses those in the rows, in ascending
    order."""

    class_values: tuple[float, ...] = ()
    """Value of each class; the score for RL is the expected value. Empty uses numeric labels, and
    false and true as 0 and 1; named classes then have no values, and the model gives no score."""

    class_weights: tuple[float, ...] = ()
    """Weight of each class in the loss; empty weights all rows equally."""

    step_separator: str = "\n"
    """Separator between the steps of a response, in training and in RL."""

    step_score: Literal["min", "product", "last"] = "min"
    """Score of a response with steps, for RL: log-odds of the worst step (min) or of the last
    step, or log-probability that all steps are correct (product)."""

    def check_labels(self) -> None:
        """Raise ConfigError for invalid or contradictory settings."""
        require(
            self.labels == "auto" or self.loss == "auto" or self.loss in LOSSES[self.labels],
            f"loss {self.loss} can't be used with labels {self.labels}; choose"
            f" {' or '.join(LOSSES.get(self.labels, ()))}",
        )
        require(self.focal_gamma >= 0, f"focal_gamma must be at least 0, got {self.focal_gamma}")
        require(
            len(set(self.class_list)) == len(self.class_list) != 1,
            f"class_list needs two or more different names, got {', '.join(self.class_list)}",
        )
        for name in ("class_values", "class_weights"):
            count = len(getattr(self, name))
            require(
                not (count and self.class_list) or count == len(self.class_list),
                f"{name} has {count} numbers, but class_list has {len(self.class_list)} names; set"
                " one for each",
            )
        require(
            all(weight > 0 for weight in self.class_weights), "class_weights must all be positive"
        )
        require(
            bool(self.step_separator),
            "step_separator must not be empty; the default is a newline",
        )


MAX_AUTO_CLASSES = 20
"""Maximum number of distinct integers that `labels: auto` treats as classes."""

SINGLE_KINDS = ("classes", "scalar")
"""Kinds of label that apply to a single response."""

REQUIRED = {
    "pairs": "a chosen and a rejected response",
    "classes": "a label",
    "scalar": "a label that is a number",
    "steps": "steps with a label for each (prompt, steps or completions, labels)",
}
"""Requirements of a row, by kind."""


@dataclass(frozen=True)
class Labels:
    """A run's kind of label, and the data's classes, or its mean and standard deviation."""

    kind: LabelKind
    loss: Loss

    classes: tuple[str, ...] = ()
    """Names in the model's order."""

    values: tuple[float, ...] = ()
    """Value of each class; empty if unknown."""

    mean: float = 0.0
    std: float = 1.0
    """Mean and standard deviation of the training labels, used to standardize them."""

    @property
    def num_labels(self) -> int:
        """Number of outputs of the model."""
        return len(self.classes) if self.kind == "classes" else 1

    @property
    def gives_scores(self) -> bool:
        """Whether the model provides a score for RL."""
        return self.kind != "classes" or bool(self.values)

    def class_index(self, example: Example) -> int:
        """Return the index of the row's class."""
        return self.classes.index(class_name(example.label))


def class_name(label: Label | None) -> str:
    """Return the name of a class: `true`, `3`, `spam`."""
    return str(label).lower() if isinstance(label, bool) else str(label)


def select_rows(
    config: LabelSettings, train: Sequence[Example], held_out: Sequence[Example]
) -> tuple[list[Example], list[Example]]:
    """Return the training and held-out rows that have labels of the kind `config.labels`.

    Raises:
        DataError: there are no such rows, all have one class, or one has an unlisted class.
    """
    kind = detect_kind(config, train)
    selected = [[row for row in rows if has_label_kind(kind, row)] for rows in (train, held_out)]
    for rows, name in zip(selected, ("training", "held-out"), strict=True):
        if not rows:
            raise DataError(
                f"reward.labels {kind}: no {name} row has {REQUIRED[kind]}; use other rows, map"
                " their columns with --fields, or choose another kind (docs/reward_models.md)"
            )
    if num_skipped := len(train) - len(selected[0]):
        logger.info("skipping %d of %d rows: not of kind %s", num_skipped, len(train), kind)
    resolve_labels(config, *selected)  # raises for invalid labels
    return selected[0], selected[1]


def detect_kind(config: LabelSettings, rows: Sequence[Example]) -> LabelKind:
    """Return `config.labels` or, if it is auto, the kind of the rows' labels."""
    if config.labels != "auto":
        return config.labels
    if any(row.steps for row in rows):
        return "steps"
    if any(row.rejected for row in rows):
        return "pairs"
    labels = {row.label for row in rows if row.label is not None}
    numbers = [label for label in labels if isinstance(label, int | float)]
    are_integers = all(isinstance(number, int) for number in numbers)
    if (
        config.class_list
        or len(numbers) < len(labels)
        or (are_integers and len(labels) <= MAX_AUTO_CLASSES)
    ):
        return "classes"
    return "scalar"


def has_label_kind(kind: LabelKind, row: Example) -> bool:
    """Return whether a row has labels of this kind."""
    if kind == "steps":
        return any(label is not None for label in row.step_labels)
    if kind in SINGLE_KINDS:
        return row.label is not None
    return bool(row.chosen and row.rejected) and not row.tie


def resolve_labels(
    config: LabelSettings, train: Sequence[Example], held_out: Sequence[Example]
) -> Labels:
    """Derive the labels from the rows that `select_rows` returned.

    Raises:
        DataError: a label is not a class or a number, or all labels are equal.
        ConfigError: class settings don't match the classes, or the loss doesn't match the labels.
    """
    kind = detect_kind(config, train)
    loss = LOSSES[kind][0] if config.loss == "auto" else config.loss
    if loss not in LOSSES[kind]:
        raise ConfigError(
            f"reward.loss {loss} can't be used with labels of kind {kind}, which the rows have;"
            f" choose {' or '.join(LOSSES[kind])}"
        )
    if kind == "steps":
        labels = [label for row in train for label in row.step_labels if label is not None]
        right = sum(label >= 0.5 for label in labels)
        if right in (0, len(labels)):
            raise DataError(
                f"all {len(labels)} labeled steps of the training rows are"
                f" {'right' if right else 'wrong'}; add rows with {'wrong' if right else 'right'}"
                " steps"
            )
    if kind == "scalar":
        return _resolve_numbers(loss, train, held_out)
    if kind == "classes":
        return _resolve_classes(loss, config, train, held_out)
    return Labels(kind, loss)


def _resolve_numbers(loss: Loss, train: Sequence[Example], held_out: Sequence[Example]) -> Labels:
    for row in (*train, *held_out):
        if not isinstance(row.label, int | float):
            raise DataError(f"{row.origin}: label must be a number, got {row.label!r}")
        if loss == "bce" and not 0 <= row.label <= 1:
            raise DataError(
                f"{row.origin}: label is {row.label:g}, but reward.loss bce needs numbers from 0 to"
                " 1; choose mse"
            )
    numbers = [float(row.label) for row in train if isinstance(row.label, int | float)]
    mean = sum(numbers) / len(numbers)
    std = math.sqrt(sum((number - mean) ** 2 for number in numbers) / len(numbers))
    if std == 0:
        raise DataError(
            f"all {len(numbers)} training rows have the label {mean:g}; add rows with other labels"
        )
    return Labels("scalar", loss) if loss == "bce" else Labels("scalar", loss, mean=mean, std=std)


def _resolve_classes(
    loss: Loss, config: LabelSettings, train: Sequence[Example], held_out: Sequence[Example]
) -> Labels:
    labels = {class_name(row.label): row.label for row in (*train, *held_out)}
    names = sorted(labels)
    if not any(isinstance(label, str) for label in labels.values()):
        names = sorted(labels, key=lambda name: float(labels[name] or 0))
    classes = config.class_list or tuple(names)
    require_listed((*train, *held_out), classes, "the classes of reward.class_list")
    for name in ("class_values", "class_weights"):
        if getattr(config, name) and len(getattr(config, name)) != len(classes):
            raise ConfigError(
                f"reward.{name} has {len(getattr(config, name))} numbers, but there are"
                f" {len(classes)} classes: {', '.join(classes)}"
            )
    counts = Counter(class_name(row.label) for row in train)
    if len(counts) < 2:
        raise DataError(
            f"all {len(train)} training rows have the class {next(iter(counts))}; a classifier"
            " needs at least two classes"
        )
    if missing := [name for name in classes if not counts[name]]:
        logger.warning("no training row has the class %s", ", ".join(missing))
    numbers = [float(x) for x in map(labels.get, classes) if isinstance(x, int | float)]
    label_values = tuple(numbers) if len(numbers) == len(classes) else ()
    return Labels("classes", loss, classes, config.class_values or label_values)


def require_listed(rows: Sequence[Example], classes: Sequence[str], owner: str) -> None:
    """Raise DataError for a row whose label is not among `classes`, the classes of `owner`."""
    for row in rows:
        if class_name(row.label) not in classes:
            raise DataError(
                f"{row.origin}: label {class_name(row.label)} is not one of {owner}"
                f" ({', '.join(classes)}); correct or remove the row"
            )
