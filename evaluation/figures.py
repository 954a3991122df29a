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
class TaskMetric:
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
        """Full name, such as `gsm8k_strict` or `gsm8k_strict_pass@4`."""
        return f"{self.task}_{self.metric}{'' if self.k == 1 else f'_pass@{self.k}'}"

    @property
    def interval(self) -> Interval:
        """95% Wilson interval (1927), with the questions as independent trials.

        With several responses to each question, their mean varies less than a single trial, so the
        interval is conservative.
        """
        return share_interval(self.value * self.questions, self.questions)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate the probability that at least one of k responses is correct.

    The unbiased estimate is 1 - C(n - c, k) / C(n, k) for n responses, of which c are correct
    (Chen et al. 2021, arXiv:2107.03374, eq. 1). It is computed exactly.

    Raises:
        ValueError: k is larger than the number of responses.
    """
    if not 0 < k <= n:
        raise ValueError(f"pass@{k} of {n} responses")
    return float(1 - Fraction(math.comb(n - c, k), math.comb(n, k)))


def compute_metrics(
    task: str, grades: Sequence[Sequence[Grades]], ks: Sequence[int]
) -> list[TaskMetric]:
    """Compute each metric at each k.

    Args:
        task: name of the task.
        grades: the grades of each question's responses.
        ks: values of k, at most the number of responses.
    """
    metrics = []
    for metric in grades[0][0]:
        # Correctness by graded item and response.
        items = [item for responses in grades for item in _group_by_item(responses, metric)]
        for k in ks:
            values = [pass_at_k(len(item), sum(item), k) for item in items]
            value = math.fsum(values) / len(values)
            metrics.append(TaskMetric(task, metric, k, value, len(items), len(grades)))
    return metrics


def _group_by_item(question_grades: Sequence[Grades], metric: str) -> list[tuple[bool, ...]]:
    return list(zip(*(grades[metric] for grades in question_grades), strict=True))


def format_table(metrics: Sequence[TaskMetric]) -> list[str]:
    """Format the metrics as a table, with their 95% intervals."""
    header = ("task", "metric", "value", "95% interval", "questions")
    rows = [
        (
            result.task,
            result.metric if result.k == 1 else f"{result.metric} pass@{result.k}",
            f"{result.value:.1%}",
            "{:.1%} to {:.1%}".format(*result.interval),
            f"{result.questions:,}",
        )
        for result in metrics
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [_format_row(row, widths) for row in (header, *rows)]


def _format_row(row: Sequence[str], widths: Sequence[int]) -> str:
    words, numbers = row[:2], row[2:]
    cells = [word.ljust(width) for word, width in zip(words, widths[:2], strict=True)]
    cells += [number.rjust(width) for number, width in zip(numbers, widths[2:], strict=True)]
    return "  ".join(cells)


def make_document(
    metrics: Sequence[TaskMetric], config: EvaluationConfig, *, weights_hash: int
) -> dict[str, Any]:
    """Return the metrics, and the weights' hash, settings and versions that produced them."""
    return {
        "path": config.path,
        "weights_hash": weights_hash,
        "figures": [
            {
                "task": result.task,
                "metric": result.metric,
                "k": result.k,
                "value": result.value,
                "count": result.count,
                "questions": result.questions,
                "low": result.interval[0],
                "high": result.interval[1],
            }
            for result in metrics
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
