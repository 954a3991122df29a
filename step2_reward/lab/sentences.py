"""Findings about a reward model in sentences, and the files of its metrics."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.files.durable import replace_durably
from pipeline.report.results import LAB
from pipeline.system.errors import counted
from step2_reward.lab.measure import Measurement

POOR_CALIBRATION = 0.1
LENGTH_BIAS = 0.15
"""Accuracy difference between longer and shorter better responses above which a bias is
reported."""


def format_findings(metrics: Mapping[str, Any]) -> list[str]:
    """Return the findings as sentences without trailing periods, most important first."""
    findings = [*_describe_accuracy(metrics), *_describe_steps(metrics)]
    findings += [*_describe_classes(metrics), *_describe_calibration(metrics)]
    return [*findings, *_describe_length(metrics), *_describe_probes(metrics)]


def _describe_accuracy(metrics: Mapping[str, Any]) -> list[str]:
    accuracy = metrics.get("accuracy")
    if accuracy is None:
        if "concordance" not in metrics:
            return []
        return [
            f"{_percent(metrics['concordance'])} of pairs of rows with different labels are ordered"
            f" correctly, and predicted labels are off by {metrics['mean_error']:.3g} on average"
        ]
    interval = f"95% interval {_percent(accuracy['low'])} to {_percent(accuracy['high'])}"
    if "classes" in metrics:
        return [
            f"{_percent(accuracy['value'])} of {metrics['rows']} rows are classified correctly"
            f" ({interval})"
        ]
    lines = [f"{_percent(accuracy['value'])} of the pairs are ordered correctly ({interval})"]
    if accuracy["low"] <= 0.5:
        lines.append("That is close to chance; do not optimize anything against this model")
    return lines


def _describe_steps(metrics: Mapping[str, Any]) -> list[str]:
    accuracy = metrics.get("step_accuracy")
    if accuracy is None:
        return []
    right, wrong = (report["rows"] for report in metrics["classes"])
    majority, word = max((right, "right"), (wrong, "wrong"))
    baseline = majority / (right + wrong)
    interval = f"95% interval {_percent(accuracy['low'])} to {_percent(accuracy['high'])}"
    lines = [
        f"{_percent(accuracy['value'])} of {accuracy['count']} steps are predicted correctly"
        f" ({interval}); always predicting '{word}' would achieve {_percent(baseline)}"
    ]
    if accuracy["low"] <= baseline:
        lines.append("The model is not clearly better; do not optimize anything against it")
    errors = metrics["first_errors"]
    parts: list[str] = []
    if errors["with_error"]:
        parts.append(
            f"the first error is found in {_percent(errors['found'] / errors['with_error'])} of"
            f" {counted(errors['with_error'], 'response')} with an error"
        )
    if errors["without_error"]:
        parts.append(
            f"no error is predicted in {_percent(errors['kept'] / errors['without_error'])} of"
            f" {counted(errors['without_error'], 'response')} without one"
        )
    line = ", and ".join(parts)
    if errors["f1"] is not None:
        line += f" (F1 {_percent(errors['f1'])})"
    return [*lines, line[:1].upper() + line[1:]]


def _describe_classes(metrics: Mapping[str, Any]) -> list[str]:
    classes = [report for report in metrics.get("classes", ()) if report["rows"]]
    if not classes:
        return []
    worst = min(classes, key=lambda report: report["recall"])
    count = counted(worst["rows"], "step" if metrics["labels"] == "steps" else "row")
    return [
        f"The mean recall of the classes is {_percent(metrics['macro_recall'])}; the lowest,"
        f" {_percent(worst['recall'])}, is that of {worst['name']}, with {count}"
    ]


def _describe_calibration(metrics: Mapping[str, Any]) -> list[str]:
    calibration = metrics.get("calibration")
    if calibration is None:
        return []
    verb = "overconfident" if calibration["temperature"] > 1 else "underconfident"
    line = (
        f"Probabilities are off by {_percent(calibration['ece'])} after scaling by temperature"
        f" {calibration['temperature']:.3g}"
    )
    if calibration["ece_raw"] > max(POOR_CALIBRATION, calibration["ece"]):
        line += f", and by {_percent(calibration['ece_raw'])} before: the model is {verb}"
    return [line]


def _describe_length(metrics: Mapping[str, Any]) -> list[str]:
    length = metrics.get("length")
    if length is None:
        return []
    best = max(length["always_longer"], length["always_shorter"])
    choice = "longer" if length["always_longer"] >= length["always_shorter"] else "shorter"
    lines = [f"Always taking the {choice} response would be right in {_percent(best)} of the pairs"]
    longer, shorter = length["better_longer"], length["better_shorter"]
    if longer and shorter and abs(longer["value"] - shorter["value"]) > LENGTH_BIAS:
        kind = "long" if longer["value"] > shorter["value"] else "short"
        lines.append(
            f"The model favors {kind} responses: {_percent(longer['value'])} of pairs are ordered"
            " correctly if the better response is the longer one,"
            f" {_percent(shorter['value'])} if it is the shorter one"
        )
    return lines


def _describe_probes(metrics: Mapping[str, Any]) -> list[str]:
    probes = metrics.get("probes") or {}
    lines: list[str] = []
    verbs = {"no_end": "lose their end", "truncated": "are cut in half", "doubled": "are repeated"}
    for name, verb in verbs.items():
        if name in probes and probes[name]["lower"] < 0.5:
            lines.append(
                f"Only {_percent(probes[name]['lower'])} of good responses score lower when they"
                f" {verb}; RL will exploit that"
            )
    return lines


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}%"


PREDICTIONS = "predictions.jsonl"


def write_measurement(measurement: Measurement, directory: Path) -> None:
    """Write lab.json and predictions.jsonl, each atomically."""
    directory.mkdir(parents=True, exist_ok=True)
    metrics, rows = measurement
    text = json.dumps(
        {"sentences": format_findings(metrics), **metrics}, indent=2, ensure_ascii=False
    )
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    for name, content in {LAB: text + "\n", PREDICTIONS: lines}.items():
        replace_durably(directory / name, content.encode())
