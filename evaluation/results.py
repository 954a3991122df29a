"""Figures as a table to read and as JSON to keep."""

import platform
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from evaluation.config import EvaluationConfig
from evaluation.figures import Figure
from pipeline import __version__
from pipeline.settings.plain import plain


def as_table(figures: Sequence[Figure]) -> list[str]:
    """A line for each figure, with its 95 % interval."""
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
    """The figures, and what they were measured with: weights, settings and versions."""
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
            **plain(config),
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
