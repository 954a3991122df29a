"""The report of a classifier: confusion matrix, precision, recall and F1 by class, AUC.

Dimension names: N rows, C classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from step2_reward.lab.ranks import area_under_curve


@dataclass(frozen=True)
class ClassFigures:
    """Figures of one class against all others."""

    name: str
    rows: int
    precision: float
    """Of rows taken for the class, the share that is of it; 0 where none is."""
    recall: float
    """Of rows of the class, the share that is taken for it."""
    f1: float
    """Harmonic mean of both."""
    auc: float | None
    """None where all rows, or none, are of the class."""


@dataclass(frozen=True)
class ClassReport:
    """What a classifier makes of rows."""

    confusion: list[list[int]]
    """Rows by true class, then by the class they are taken for."""

    classes: list[ClassFigures]

    @property
    def rows(self) -> int:
        """All rows."""
        return sum(map(sum, self.confusion))

    @property
    def accuracy(self) -> float:
        """Share of the rows in their class."""
        return sum(row[place] for place, row in enumerate(self.confusion)) / max(1, self.rows)

    @property
    def macro_recall(self) -> float:
        """Mean over the classes that have rows: what always taking the largest has 1/C of."""
        return self._mean("recall")

    @property
    def macro_f1(self) -> float:
        """Mean over the classes that have rows."""
        return self._mean("f1")

    def _mean(self, figure: str) -> float:
        found = [getattr(each, figure) for each in self.classes if each.rows]
        return sum(found) / max(1, len(found))


def class_report(
    logprobs: Float[Tensor, "N C"], classes: Int[Tensor, " N"], names: Sequence[str]
) -> ClassReport:
    """The report on rows of known classes, each taken for its likeliest one."""
    count = len(names)
    taken = logprobs.argmax(dim=1)
    confusion = torch.bincount(classes * count + taken, minlength=count * count)
    matrix: list[list[int]] = confusion.view(count, count).tolist()
    figures: list[ClassFigures] = []
    for place, name in enumerate(names):
        hits, rows = matrix[place][place], sum(matrix[place])
        precision = hits / max(1, sum(row[place] for row in matrix))
        recall = hits / max(1, rows)
        f1 = 2 * precision * recall / (precision + recall) if hits else 0.0
        auc = area_under_curve(logprobs[:, place].double(), classes == place)
        figures.append(ClassFigures(name, rows, precision, recall, f1, auc))
    return ClassReport(matrix, figures)
