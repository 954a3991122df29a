"""Metrics of a task: fractions of correct responses, pass@k, their intervals and their table."""

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import transformers

from evaluation.config import EvaluationConfig
from evaluation.contract import Grades
from pipeline import __version__
from pipeline.report.figures import Interval, share_interval
from pipeline.settings.fields import to_plain


@dataclass(frozen=True)
class Figure:
    """A metric of a task, at one k."""

    task: str

    metric: str

    k: int
    """Number of responses of which at least one must be correct; 1 is the accuracy."""

    value: float

    count: int
    """Number of graded items: questions, or for IFEval's `instruction_*` metrics, instructions."""

    questions: int

    @property
    def name(self) -> str:
        """`gsm8k_strict`, or `gsm8k_strict_pass@4`."""
        return f"{self.task}_{self.metric}{'' if self.k == 1 else f'_pass@{self.k}'}"

    @property
    def interval(self) -> Interval:
        """95 % Wilson interval (1927), with the questions as independent trials.

        With several responses to each question, their mean varies less than a single trial, so the
        interval is conservative.
        """
        return share_interval(self.value * self.questions, self.questions)


def pass_at_k(count: int, right: int, k: int) -> float:
    """Probability that at least one of k responses is right, if `right` of `count` are.

    The unbiased estimate 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, eq. 1),
    computed exactly.

    Raises:
        ValueError: k is larger than the number of responses.
    """
    if not 0 < k <= count:
        raise ValueError(f"pass@{k} of {count} responses")
    return float(1 - Fraction(math.comb(count - right, k), math.comb(count, k)))


def compute_figures(
    task: str, grades: Sequence[Sequence[Grades]], ks: Sequence[int]
) -> list[Figure]:
    """Compute each metric at each k.

    Args:
        task: name of the task.
        grades: the grades of each question's responses.
        ks: values of k, at most the number of responses.
    """
    figures = []
    for metric in grades[0][0]:
        # Correctness by graded item and response.
        things = [thing for of_question in grades for thing in _by_thing(of_question, metric)]
        for k in ks:
            values = [pass_at_k(len(thing), sum(thing), k) for thing in things]
            value = math.fsum(values) / len(values)
            figures.append(Figure(task, metric, k, value, len(things), len(grades)))
    return figures


def _by_thing(of_question: Sequence[Grades], metric: str) -> list[tuple[bool, ...]]:
    return list(zip(*(grades[metric] for grades in of_question), strict=True))


def as_table(figures: Sequence[Figure]) -> list[str]:
    """One line per figure, with its 95 % interval."""
    heads = ("task", "metric", "value", "95 % interval", "questions")
    rows = [
        (
            each.task,
            each.metric if each.k == 1 else f"{each.metric} pass@{each.k}",
            f"{each.value:.1%}",
            "{:.1%} to {:.1%}".format(*each.interval),
            f"{each.questions:,}",
        )
        for each in figures
    ]
    widths = [max(map(len, of_column)) for of_column in zip(heads, *rows, strict=True)]
    return [_line(row, widths) for row in (heads, *rows)]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    words, numbers = row[:2], row[2:]
    cells = [word.ljust(width) for word, width in zip(words, widths[:2], strict=True)]
    cells += [number.rjust(width) for number, width in zip(numbers, widths[2:], strict=True)]
    return "  ".join(cells)


def document(
    figures: Sequence[Figure], config: EvaluationConfig, *, weights_hash: int
) -> dict[str, Any]:
    """The metrics, with the weights, settings and versions they were computed with."""
    return {
        "path": config.path,
        "weights_hash": weights_hash,
        "figures": [
            {
                "task": each.task,
                "metric": each.metric,
                "k": each.k,
                "value": each.value,
                "count": each.count,
                "questions": each.questions,
                "low": each.interval[0],
                "high": each.interval[1],
            }
            for each in figures
        ],
        "settings": {
            **to_plain(config),
            "samples": config.num_samples,
            "temperature": config.sampling_temperature,
        },
        "versions": {
            "rlhf-pipeline": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
