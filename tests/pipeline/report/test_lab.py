"""The laboratory's part of the report: sentences, tables and pictures of what was measured."""

import json
from pathlib import Path
from typing import Any

from pipeline.report.page import write_lab

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
    "best_of": [
        {"n": 1, "kl": 0.0, "proxy": -1.0, "gold": 0.3},
        {"n": 4, "kl": 0.64, "proxy": 2.0, "gold": 0.6},
    ],
}


def test_sentences_confusion_and_charts_are_shown_with_escaped_names(tmp_path: Path) -> None:
    (tmp_path / "lab.json").write_text(json.dumps(FIGURES))

    page = write_lab(tmp_path, heading="Reward model").read_text()

    sections = ("It favours long responses.", "Confusion", "&lt;b&gt;", "Reliability")
    for shown in (*sections, "Over-optimization"):
        assert shown in page, shown
    assert "<b>," not in page
    assert page.count("<svg") == 2
