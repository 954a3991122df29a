"""The laboratory's files: figures for the report, predictions beside the rows."""

import json
from pathlib import Path

from pipeline.files.durable import replace_durably
from pipeline.report.results import LAB
from step2_reward.lab.measure import Measured
from step2_reward.lab.sentences import sentences

PREDICTIONS = "predictions.jsonl"


def write_measured(measured: Measured, directory: Path) -> None:
    """Write lab.json and predictions.jsonl, each whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    figures = {"sentences": sentences(measured.figures), **measured.figures}
    lines = [json.dumps(each, ensure_ascii=False) + "\n" for each in measured.predictions]
    for name, text in {
        LAB: json.dumps(figures, indent=2, ensure_ascii=False) + "\n",
        PREDICTIONS: "".join(lines),
    }.items():
        replace_durably(directory / name, text.encode("utf-8"), temporary=directory / f"{name}.tmp")
