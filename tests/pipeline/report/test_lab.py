"""The laboratory's part of the report: sentences, tables and pictures of what was measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import DataError
from pipeline.report.lab import read_lab, view, write_page
from pipeline.report.write import write_report

CLASSES = [
    {"name": "<b>", "rows": 3, "precision": 1.0, "recall": 2 / 3, "f1": 0.8, "auc": 0.9},
    {"name": "good", "rows": 5, "precision": 0.5, "recall": 1.0, "f1": 2 / 3, "auc": None},
]
FIGURES: dict[str, Any] = {
    "sentences": ["It favours long responses"],
    "labels": "classes",
    "rows": 8,
    "confusion": [[2, 1], [0, 5]],
    "classes": CLASSES,
    "calibration": {
        "temperature": 1.5,
        "bins": [
            {"confidence": 0.6, "accuracy": 0.5, "rows": 4},
            {"confidence": 0.9, "accuracy": 0.8, "rows": 4},
        ],
    },
    "length": {
        "spearman": 0.5,
        "of_data": 0.0,
        "better_longer": {"value": 0.9, "low": 0.8, "high": 0.95, "count": 40},
        "better_shorter": None,
        "always_longer": 0.5,
        "always_shorter": 0.5,
    },
    "probes": {"doubled": {"change": -0.2, "lower": 0.25, "responses": 4}},
    "best_of": [
        {"n": 1, "kl": 0.0, "proxy": -1.0, "gold": 0.3},
        {"n": 4, "kl": 0.64, "proxy": 2.0, "gold": 0.6},
    ],
}


def test_every_figure_is_shown_and_names_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "lab.json").write_text(json.dumps(FIGURES))

    page = write_page(tmp_path, title="Reward model").read_text()

    for shown in (
        *("It favours long responses.", "Confusion", "&lt;b&gt;", "66.7", "Reliability"),
        *("Over-optimization", "Probes", "repeated", "90\u202f% of 40", "no pairs"),
    ):
        assert shown in page, shown
    assert "<b>," not in page
    assert page.count("<svg") == 2


def test_nothing_measured_shows_nothing_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    assert view(read_lab(tmp_path)) is None
    (tmp_path / "lab.json").write_text("{")

    with pytest.raises(DataError, match=r"lab\.json is not valid JSON"):
        read_lab(tmp_path)


def test_the_finding_of_a_classifier_counts_rows(tmp_path: Path) -> None:
    step = tmp_path / "step2_reward"
    step.mkdir()
    (step / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    figures = {"accuracy_before": 0.4, "accuracy_after": 0.9, "rows": 200, "labels": "classes"}
    (step / "result.json").write_text(json.dumps({"eval": figures}))
    (step / "lab.json").write_text(json.dumps(FIGURES))

    page = write_report(tmp_path).read_text()

    assert "puts 90\u202f% of 200 held-out rows in their class" in page
    assert "how far it can be trusted" in page
