"""Are probabilities as often right as they say? ECE, Brier score, temperature.

Dimension names: N rows, C classes. A pair is two classes with the logits (difference, 0), of which
the first is right.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

BINS = 15
"""Bins of equally many rows (Nguyen and O'Connor 2015; 15 as in Guo et al. 2017)."""

COLDEST, HOTTEST = 1e-2, 1e2
"""Temperatures that are looked at: where every row is right, none is too cold."""


@dataclass(frozen=True)
class Bin:
    """Rows of similar confidence."""

    confidence: float
    """Mean probability of the likeliest class."""
    accuracy: float
    """Share of rows of which that class is right."""
    rows: int


@dataclass(frozen=True)
class Calibration:
    """How far probabilities can be believed."""

    ece: float
    """Mean distance of confidence and accuracy over the bins, weighted by rows."""
    ece_raw: float
    """The same at temperature 1."""
    brier: float
    """Mean squared distance of the probabilities from what is right (Brier 1950)."""
    temperature: float
    """By which logits are to be divided; above 1 the model is too sure of itself."""
    bins: list[Bin]


def calibrate(logits: Float[Tensor, "N C"], classes: Int[Tensor, " N"]) -> Calibration:
    """The calibration of probabilities after temperature scaling (Guo et al. 2017, section 4.2).

    A row is never judged by a temperature that it helped to fit: each half of the rows is scaled by
    that of the other half. `temperature` itself is that of all rows.
    """
    logits = logits.double()
    even = torch.arange(len(logits)) % 2 == 0
    scaled = logits.clone()
    for half in (even, ~even):
        if half.any() and not half.all():
            scaled[half] = logits[half] / fit_temperature(logits[~half], classes[~half])
    bins = bins_of(scaled, classes)
    probabilities = scaled.softmax(dim=1)
    distance = (probabilities - F.one_hot(classes, logits.shape[1])).square().sum(dim=1).mean()
    if logits.shape[1] == 2:  # both classes are equally far off: one is counted
        distance = distance / 2
    return Calibration(
        ece=expected_error(bins),
        ece_raw=expected_error(bins_of(logits, classes)),
        brier=distance.item(),
        temperature=fit_temperature(logits, classes),
        bins=bins,
    )


def fit_temperature(logits: Float[Tensor, "N C"], classes: Int[Tensor, " N"]) -> float:
    """The temperature of the least negative log-likelihood, which has one minimum in 1 / T."""

    def nll(inverse: float) -> float:
        return F.cross_entropy(logits * inverse, classes).item()

    return 1 / minimum(nll, 1 / HOTTEST, 1 / COLDEST)


def minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one minimum between two positive ends has it, by golden sections."""
    ratio = (math.sqrt(5) - 1) / 2
    start, end = math.log(low), math.log(high)
    for _ in range(60):
        left, right = end - ratio * (end - start), start + ratio * (end - start)
        if function(math.exp(left)) <= function(math.exp(right)):
            end = right
        else:
            start = left
    return math.exp((start + end) / 2)


def bins_of(
    logits: Float[Tensor, "N C"], classes: Int[Tensor, " N"], count: int = BINS
) -> list[Bin]:
    """Rows by confidence, the least sure first, in bins of equally many.

    A row whose likeliest classes are equally likely is right by the share of them that is.
    """
    probabilities = logits.softmax(dim=1)
    confidence = probabilities.max(dim=1).values
    likeliest = probabilities == confidence[:, None]
    right = likeliest.gather(1, classes[:, None]).squeeze(1) / likeliest.sum(dim=1)
    order = confidence.argsort(stable=True)
    parts = [part for part in order.tensor_split(min(count, max(1, len(order)))) if len(part)]
    return [
        Bin(confidence[part].mean().item(), right[part].double().mean().item(), len(part))
        for part in parts
    ]


def expected_error(bins: list[Bin]) -> float:
    """The expected calibration error: |confidence - accuracy|, weighted by rows."""
    rows = sum(each.rows for each in bins)
    return sum(each.rows * abs(each.confidence - each.accuracy) for each in bins) / max(1, rows)
