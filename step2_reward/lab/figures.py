"""Metrics of a reward model: rank agreement, classes, calibration, length bias, steps.

Pure functions. Dimension names: N rows or items, C classes. A pair is a row of two classes with
logits (difference, 0); the first class is correct.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pipeline.report.figures import share_interval


def average_ranks(values: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Return the rank of each value, starting at 1; equal values get the mean of their ranks."""
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    return (last - (counts - 1) / 2)[inverse].to(torch.float64)


def spearman(first_values: Float[Tensor, " N"], second_values: Float[Tensor, " N"]) -> float:
    """Compute Spearman's rank correlation, or 0 if either variable is constant."""
    first, second = (average_ranks(values) for values in (first_values, second_values))
    first, second = first - first.mean(), second - second.mean()
    norm = math.sqrt((first.square().sum() * second.square().sum()).item())
    return (first @ second).item() / norm if norm > 0 else 0.0


def concordance(scores: Float[Tensor, " N"], targets: Float[Tensor, " N"]) -> float:
    """Return the fraction of pairs with different targets whose scores are in the same order.

    Pairs with equal scores count half. Returns 1/2 if there are no pairs with different targets.
    """
    right, total = 0.0, 0
    for index in range(len(targets)):  # one row at a time, for linear memory
        above = targets > targets[index]
        higher = scores[above]
        right += (higher > scores[index]).sum().item() + 0.5 * (
            higher == scores[index]
        ).sum().item()
        total += int(above.sum())
    return right / total if total else 0.5


def area_under_curve(scores: Float[Tensor, " N"], positive: Bool[Tensor, " N"]) -> float | None:
    """Return the area under the ROC curve, or None unless there are positives and negatives.

    This is P(a positive scores above a negative), ties counting half (Mann and Whitney 1947).
    """
    num_positive = int(positive.sum())
    num_negative = len(positive) - num_positive
    if not num_positive or not num_negative:
        return None
    ranks = average_ranks(scores)[positive].sum().item()
    return (ranks - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)


def class_report(
    logprobs: Float[Tensor, "N C"], classes: Int[Tensor, " N"], names: Sequence[str]
) -> dict[str, Any]:
    """Compute metrics of rows with known classes, predicting the most probable class.

    Returns:
        macro_recall and macro_f1, means over the classes that have rows; confusion, the number
            of rows by true and predicted class; and classes, for each class against all others: its
            name, number of rows, precision (0 without a prediction), recall, f1 and auc (None
            unless there are rows of both kinds).
    """
    num_classes = len(names)
    predicted = logprobs.argmax(dim=1)
    confusion = torch.bincount(classes * num_classes + predicted, minlength=num_classes**2)
    matrix: list[list[int]] = confusion.view(num_classes, num_classes).tolist()
    reports: list[dict[str, Any]] = []
    for index, name in enumerate(names):
        hits, rows = matrix[index][index], sum(matrix[index])
        precision = hits / max(1, sum(row[index] for row in matrix))
        recall = hits / max(1, rows)
        f1 = 2 * precision * recall / (precision + recall) if hits else 0.0
        auc = area_under_curve(logprobs[:, index].double(), classes == index)
        reports.append(
            {"name": name, "rows": rows, "precision": precision, "recall": recall, "f1": f1}
            | {"auc": auc}
        )
    present = [report for report in reports if report["rows"]]
    return {
        "macro_recall": sum(report["recall"] for report in present) / max(1, len(present)),
        "macro_f1": sum(report["f1"] for report in present) / max(1, len(present)),
        "confusion": matrix,
        "classes": reports,
    }


BINS = 15
"""Number of bins with equal numbers of rows (Nguyen and O'Connor 2015; 15 as in Guo et al.
2017)."""

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-2, 1e2
"""Range of fitted temperatures; if every prediction is correct, the optimum is the lowest."""


def calibrate(logits: Float[Tensor, "N C"], classes: Int[Tensor, " N"]) -> dict[str, Any]:
    """Measure calibration after temperature scaling (Guo et al. 2017, section 4.2).

    Each half of the rows is scaled by the temperature fitted to the other half, so that no row is
    evaluated with a temperature that was fitted to it.

    Returns:
        ece, the expected calibration error; ece_raw, the same at temperature 1; temperature, the
            divisor of logits fitted to all rows; and bins with mean confidence, accuracy and number
            of rows.
    """
    logits = logits.double()
    even = torch.arange(len(logits)) % 2 == 0
    scaled = logits.clone()
    for half in (even, ~even):
        if half.any() and not half.all():
            scaled[half] = logits[half] / fit_temperature(logits[~half], classes[~half])
    bins = make_bins(scaled, classes)
    return {
        "ece": expected_error(bins),
        "ece_raw": expected_error(make_bins(logits, classes)),
        "temperature": fit_temperature(logits, classes),
        "bins": bins,
    }


def fit_temperature(logits: Float[Tensor, "N C"], classes: Int[Tensor, " N"]) -> float:
    """Find the temperature that minimizes the negative log-likelihood, which is convex in 1 / T."""

    def nll(inverse_temperature: float) -> float:
        return F.cross_entropy(logits * inverse_temperature, classes).item()

    return 1 / minimize(nll, 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE)


def minimize(function: Callable[[float], float], low: float, high: float) -> float:
    """Minimize a unimodal function between two positive bounds by golden-section search."""
    ratio = (math.sqrt(5) - 1) / 2
    start, end = math.log(low), math.log(high)
    for _ in range(60):
        left, right = end - ratio * (end - start), start + ratio * (end - start)
        if function(math.exp(left)) <= function(math.exp(right)):
            end = right
        else:
            start = left
    return math.exp((start + end) / 2)


def make_bins(
    logits: Float[Tensor, "N C"], classes: Int[Tensor, " N"], count: int = BINS
) -> list[dict[str, float]]:
    """Sort rows by the probability of their most likely class, and split them into equal bins.

    If n classes tie as the most likely, and one of them is correct, the row counts as 1 / n.
    """
    probabilities = logits.softmax(dim=1)
    confidence = probabilities.max(dim=1).values
    likeliest = probabilities == confidence[:, None]
    right = likeliest.gather(1, classes[:, None]).squeeze(1) / likeliest.sum(dim=1)
    order = confidence.argsort(stable=True)
    parts = [part for part in order.tensor_split(min(count, max(1, len(order)))) if len(part)]
    return [
        {
            "confidence": confidence[part].mean().item(),
            "accuracy": right[part].double().mean().item(),
            "rows": len(part),
        }
        for part in parts
    ]


def expected_error(bins: Sequence[Mapping[str, float]]) -> float:
    """Return the expected calibration error: |confidence - accuracy|, weighted by rows."""
    rows = sum(x["rows"] for x in bins)
    return sum(x["rows"] * abs(x["confidence"] - x["accuracy"]) for x in bins) / max(1, rows)


def length_bias(
    prompts: Sequence[tuple[Sequence[float], Sequence[int], Sequence[float]]],
) -> dict[str, Any]:
    """Measure how score and length are related within prompts that have several responses.

    Args:
        prompts: scores, lengths in tokens, and labels of the responses to each prompt; a higher
            label is better, and equal ones are ties.

    Returns:
        spearman, the mean rank correlation of score and length; of_data, the same for label and
            length; better_longer and better_shorter, fractions of correctly ordered pairs among
            those whose better response is longer or shorter (None without such pairs);
            always_longer and always_shorter, accuracy of always choosing the longer or the shorter
            response, ties counting half.
    """
    longer, shorter, num_equal = list[float](), list[float](), 0
    for scores, lengths, labels in prompts:
        for better, worse in ordered_pairs(labels):
            right = order_credit(scores[better] - scores[worse])
            if lengths[better] == lengths[worse]:
                num_equal += 1
            else:
                (longer if lengths[better] > lengths[worse] else shorter).append(right)
    total = len(longer) + len(shorter) + num_equal
    always = (len(longer) + 0.5 * num_equal) / max(1, total)
    return {
        "spearman": _correlation_within([(scores, lengths) for scores, lengths, _ in prompts]),
        "of_data": _correlation_within([(labels, lengths) for _, lengths, labels in prompts]),
        "better_longer": fraction(sum(longer), len(longer)) if longer else None,
        "better_shorter": fraction(sum(shorter), len(shorter)) if shorter else None,
        "always_longer": always,
        "always_shorter": 1 - always if total else 0.0,
    }


def order_credit(difference: float) -> float:
    """Return 1 for a positive score difference, 1/2 for 0, else 0."""
    return float(difference > 0) + 0.5 * float(difference == 0)


def ordered_pairs(labels: Sequence[float]) -> list[tuple[int, int]]:
    """Return (better, worse) indices for every pair of responses with different labels."""
    indices = range(len(labels))
    return [(i, j) for i in indices for j in indices if labels[i] > labels[j]]


def _correlation_within(prompts: Sequence[tuple[Sequence[float], Sequence[int]]]) -> float:
    """Return the mean rank correlation over the prompts whose responses differ in length."""
    correlations = [
        spearman(torch.tensor(values).double(), torch.tensor(lengths).double())
        for values, lengths in prompts
        if len(set(lengths)) > 1
    ]
    return sum(correlations) / len(correlations) if correlations else 0.0


@dataclass(frozen=True)
class PredictedSteps:
    """The labeled steps of a response."""

    targets: tuple[float, ...]
    """Correctness of each step, from 0 to 1; a step is correct if this is at least 1/2."""

    logits: tuple[float, ...]
    """The model's log-odds that each step is correct."""

    @property
    def first_error(self) -> int | None:
        """Index of the first wrong step; None if all are correct."""
        return next((index for index, target in enumerate(self.targets) if target < 0.5), None)

    @property
    def first_predicted_error(self) -> int | None:
        """Index of the first step that the model predicts to be wrong; None if there is none."""
        return next((index for index, logit in enumerate(self.logits) if logit <= 0), None)


def first_errors(rows: Sequence[PredictedSteps]) -> dict[str, Any]:
    """Compute the metrics of ProcessBench (Zheng et al. 2024, 2412.06559, section 3).

    Returns:
        with_error, the number of responses with a wrong step; found, the number of those whose
        first predicted error is the first error; without_error, the number of the other responses;
        kept, the number of those without a predicted error; accuracy; and f1, the harmonic mean of
        found / with_error and kept / without_error (None without responses of both kinds).
        Responses without a labeled step are left out.
    """
    labeled = [row for row in rows if row.targets]
    wrong = [row for row in labeled if row.first_error is not None]
    right = [row for row in labeled if row.first_error is None]
    found = sum(row.first_predicted_error == row.first_error for row in wrong)
    kept = sum(row.first_predicted_error is None for row in right)
    f1 = None
    if wrong and right:
        rates = found / len(wrong), kept / len(right)
        f1 = 2 * rates[0] * rates[1] / sum(rates) if sum(rates) else 0.0
    counts = {"with_error": len(wrong), "found": found, "without_error": len(right), "kept": kept}
    return {**counts, "f1": f1, "accuracy": (found + kept) / max(1, len(labeled))}


def summarize_steps(rows: Sequence[PredictedSteps]) -> dict[str, float]:
    """Compute accuracy and macro recall of steps, and accuracy and F1 of first errors."""
    pairs = [pair for row in rows for pair in zip(row.targets, row.logits, strict=True)]
    by_label = {
        is_right: [logit for target, logit in pairs if (target >= 0.5) == is_right]
        for is_right in (True, False)
    }
    hits = {label: sum((x > 0) == label for x in logits) for label, logits in by_label.items()}
    recalls = [hits[label] / len(logits) for label, logits in by_label.items() if logits]
    errors = first_errors(rows)
    metrics = {
        "accuracy": sum(hits.values()) / max(1, len(pairs)),
        "macro_recall": sum(recalls) / max(1, len(recalls)),
        "first_error_accuracy": errors["accuracy"],
    }
    return metrics if errors["f1"] is None else {**metrics, "first_error_f1": errors["f1"]}


def fraction(right: float, count: int) -> dict[str, float | int]:
    """Return a fraction with its 95% interval (Wilson 1927)."""
    low, high = share_interval(right, count)
    return {"value": right / count, "low": low, "high": high, "count": count}
