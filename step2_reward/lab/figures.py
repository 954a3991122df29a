"""What several kinds of label have in the laboratory: shares with intervals, and classes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from jaxtyping import Float, Int
from torch import Tensor

from pipeline.report.intervals import share_interval
from step2_reward.lab.classes import class_report


@dataclass(frozen=True)
class Measured:
    """Rows and what the model makes of them."""

    figures: dict[str, object]
    """As lab.json has them."""

    predictions: list[dict[str, object]]
    """A line for each row: the row, its scores, and what it is taken for."""


def share(right: float, count: int) -> dict[str, float | int]:
    """A share with its 95 % interval (Wilson 1927)."""
    low, high = share_interval(right, count)
    return {"value": right / count, "low": low, "high": high, "count": count}


def of_classes(
    logprobs: Float[Tensor, "N C"], classes: Int[Tensor, " N"], names: Sequence[str]
) -> dict[str, object]:
    """Confusion matrix and what follows from it."""
    report = class_report(logprobs, classes, names)
    key = "outcomes" if names == ("win", "tie", "loss") else "accuracy"
    return {
        key: share(report.accuracy * report.rows, report.rows),
        "macro_recall": report.macro_recall,
        "macro_f1": report.macro_f1,
        "confusion": report.confusion,
        "classes": [asdict(each) for each in report.classes],
    }
