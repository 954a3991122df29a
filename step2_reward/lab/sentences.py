"""The laboratory's findings as sentences, and its files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.files.durable import replace_durably
from pipeline.report.results import LAB
from step2_reward.lab.measure import Measured

POOR_CALIBRATION = 0.1
BIASED = 0.15
"""Accuracy difference between longer and shorter better responses above which a bias is
reported."""


def sentences(figures: Mapping[str, Any]) -> list[str]:
    """Findings, most important first, without trailing periods."""
    first = [*_accuracy(figures), *_steps(figures)]
    found = [*first, *_classes(figures), *_calibration(figures)]
    return [*found, *_length(figures), *_probes(figures)]


def _format_count(number: int, name: str) -> str:
    return f"{number} {name}{'s' if number != 1 else ''}"


def _accuracy(figures: Mapping[str, Any]) -> list[str]:
    accuracy = figures.get("accuracy")
    if accuracy is None:
        if "concordance" not in figures:
            return []
        return [
            f"{_percent(figures['concordance'])} of rows with different labels are in the right"
            f" order, and predicted labels are off by {figures['mean_error']:.3g} on average"
        ]
    interval = f"95 % interval {_percent(accuracy['low'])} to {_percent(accuracy['high'])}"
    if "classes" in figures:
        return [
            f"{_percent(accuracy['value'])} of {figures['rows']} rows are classified correctly"
            f" ({interval})"
        ]
    lines = [f"{_percent(accuracy['value'])} of the responses are in the right order ({interval})"]
    if accuracy["low"] <= 0.5:
        lines.append("That is near chance: nothing should be optimized against this model")
    return lines


def _steps(figures: Mapping[str, Any]) -> list[str]:
    accuracy = figures.get("step_accuracy")
    if accuracy is None:
        return []
    right, wrong = (each["rows"] for each in figures["classes"])
    most, word = max((right, "right"), (wrong, "wrong"))
    usual = most / (right + wrong)
    interval = f"95 % interval {_percent(accuracy['low'])} to {_percent(accuracy['high'])}"
    lines = [
        f"{_percent(accuracy['value'])} of {accuracy['count']} steps are predicted correctly"
        f" ({interval}); always predicting {word} would achieve {_percent(usual)}"
    ]
    if accuracy["low"] <= usual:
        lines.append("That is near chance: nothing should be optimized against this model")
    errors = figures["first_errors"]
    parts: list[str] = []
    if errors["with_error"]:
        parts.append(
            f"the first error is found in {_percent(errors['found'] / errors['with_error'])} of"
            f" {_format_count(errors['with_error'], 'response')} that have one"
        )
    if errors["without_error"]:
        parts.append(
            f"none is predicted in {_percent(errors['kept'] / errors['without_error'])} of"
            f" {_format_count(errors['without_error'], 'response')} without"
        )
    line = ", and ".join(parts)
    if errors["f1"] is not None:
        line += f" (F1 {_percent(errors['f1'])})"
    return [*lines, line[:1].upper() + line[1:]]


def _classes(figures: Mapping[str, Any]) -> list[str]:
    classes = [each for each in figures.get("classes", ()) if each["rows"]]
    if not classes:
        return []
    what = "steps" if figures["labels"] == "steps" else "rows"
    worst = min(classes, key=lambda each: each["recall"])
    return [
        f"The mean recall of the classes is {_percent(figures['macro_recall'])}; the lowest,"
        f" {_percent(worst['recall'])}, is that of {worst['name']} with {worst['rows']} {what}"
    ]


def _calibration(figures: Mapping[str, Any]) -> list[str]:
    found = figures.get("calibration")
    if found is None:
        return []
    verb = "overconfident" if found["temperature"] > 1 else "underconfident"
    line = (
        f"Probabilities are off by {_percent(found['ece'])} after scaling by temperature"
        f" {found['temperature']:.3g}"
    )
    if found["ece_raw"] > max(POOR_CALIBRATION, found["ece"]):
        line += f", and by {_percent(found['ece_raw'])} before: the model is {verb}"
    return [line]


def _length(figures: Mapping[str, Any]) -> list[str]:
    found = figures.get("length")
    if found is None:
        return []
    best = max(found["always_longer"], found["always_shorter"])
    which = "longer" if found["always_longer"] >= found["always_shorter"] else "shorter"
    lines = [f"Always taking the {which} response would be right in {_percent(best)} of the pairs"]
    longer, shorter = found["better_longer"], found["better_shorter"]
    if longer and shorter and abs(longer["value"] - shorter["value"]) > BIASED:
        what = "long" if longer["value"] > shorter["value"] else "short"
        lines.append(
            f"It favors {what} responses: {_percent(longer['value'])} of pairs are in order where"
            f" the better response is the longer one, {_percent(shorter['value'])} where it is the"
            " shorter"
        )
    return lines


def _probes(figures: Mapping[str, Any]) -> list[str]:
    found = figures.get("probes") or {}
    lines: list[str] = []
    names = {"no_end": "lose their end", "truncated": "are cut in half", "doubled": "are repeated"}
    for name, what in names.items():
        if name in found and found[name]["lower"] < 0.5:
            lines.append(
                f"Only {_percent(found[name]['lower'])} of good responses score lower when they"
                f" {what}: RL will exploit that"
            )
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


PREDICTIONS = "predictions.jsonl"


def write_measured(measured: Measured, directory: Path) -> None:
    """Write lab.json and predictions.jsonl, each atomically."""
    directory.mkdir(parents=True, exist_ok=True)
    figures, rows = measured
    text = json.dumps({"sentences": sentences(figures), **figures}, indent=2, ensure_ascii=False)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    for name, content in {LAB: text + "\n", PREDICTIONS: lines}.items():
        replace_durably(directory / name, content.encode())
