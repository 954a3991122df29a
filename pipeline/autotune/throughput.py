"""A model of throughput: a Gaussian process over the candidates, fitted to those measured.

The logarithm of the seconds per token is taken as a sum of one effect for each dimension, with a
smaller effect of all dimensions together (an additive kernel: Duvenaud et al. 2011). Sizes of
batches act by their logarithm, smoothly; everything else by being the same or not. What is known
beforehand is the mean: recomputing activations adds a forward pass to the three that a forward and
a backward pass take, and stages of a pipeline wait for each other. The next trial is the candidate
of the highest expected improvement (Jones et al. 1998).

Dimension names: N candidates measured, M candidates left, D dimensions.
"""

import math
import statistics
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from pipeline.autotune.points import Point
from pipeline.autotune.space import Candidate, Space, Value
from pipeline.parallel.schedules import bubble

OCTAVES = 1.5
"""Length scale of a size: after that many doublings its effect has become another one."""

TOGETHER = 0.2
"""Share of the variance that no dimension has by itself."""

LEAST_DEVIATION = 0.05
"""Standard deviation, in log seconds, expected between candidates that measure the same."""

LEAST_NOISE = 0.01
"""Standard deviation of a measurement, in log seconds, however little its steps differ."""

RECOMPUTING = math.log(4 / 3)
"""Log of the cost of recomputing activations, known beforehand: a third more operations."""

KNOWN = 0.25
"""Variance of the effect of recomputing, which is about what is known, against that of others."""


def most_promising(space: Space, left: Sequence[Candidate], points: Sequence[Point]) -> Candidate:
    """The candidate of the highest expected improvement; of equals the first in order."""
    measured = [point for point in points if point.speed]
    if not measured:
        return left[0]
    known = [space.candidate(point.settings) for point in measured]
    seconds = np.array([-math.log(point.speed or 1.0) for point in measured])
    before = np.array([_expected(space, each) for each in known])
    noise = max(statistics.median(_error(point) for point in measured), LEAST_NOISE)
    mean, deviation = fit(
        _similarity(space, known, known),
        _similarity(space, left, known),
        seconds - before,
        noise=noise,
    )
    mean = mean + np.array([_expected(space, each) for each in left])
    gains = [
        _expected_improvement(float(seconds.min()) - each, float(width))
        for each, width in zip(mean, deviation, strict=True)
    ]
    # A difference of a millionth is the rounding of sums that are the same.
    most = max(gains)
    return next(each for each, gain in zip(left, gains, strict=True) if gain > most * (1 - 1e-6))


def fit(
    among: Float[ndarray, "N N"],
    between: Float[ndarray, "M N"],
    values: Float[ndarray, " N"],
    *,
    noise: float,
) -> tuple[Float[ndarray, " M"], Float[ndarray, " M"]]:
    """Mean and standard deviation of a Gaussian process (Rasmussen and Williams 2006, eq. 2.25).

    Args:
        among: correlations of what was measured, 1 on the diagonal.
        between: correlations of what is left with it.
        values: what was measured; their mean is taken for the mean of all.
        noise: standard deviation of a measurement, in units of `values`.
    """
    centre = float(np.mean(values))
    variance = max(float(np.var(values)), LEAST_DEVIATION**2)
    covariance = variance * among + noise**2 * np.eye(len(values))
    across = variance * between
    mean = centre + across @ np.linalg.solve(covariance, values - centre)
    explained = np.einsum("mn,nm->m", across, np.linalg.solve(covariance, across.T))
    return mean, np.sqrt(np.maximum(variance - explained, 0.0))


def _similarity(
    space: Space, rows: Sequence[Candidate], columns: Sequence[Candidate]
) -> Float[ndarray, "A B"]:
    """Correlation of the speeds of candidates."""
    each = np.stack(
        [
            _alike(dimension.values, [c[place] for c in rows], [c[place] for c in columns])
            for place, dimension in enumerate(space.dimensions)
        ]
    )  # (D, A, B)
    weights = [KNOWN if d.name == "gradient_checkpointing" else 1.0 for d in space.dimensions]
    alone = np.average(each, axis=0, weights=weights)
    return (1 - TOGETHER) * alone + TOGETHER * each.prod(axis=0)


def _alike(
    values: Sequence[Value], rows: Sequence[Value], columns: Sequence[Value]
) -> Float[ndarray, "A B"]:
    """Correlation of the effects of two values of one dimension."""
    if not all(isinstance(value, int) and value > 0 for value in values) or len(values) < 3:
        return np.array([[float(row == column) for column in columns] for row in rows])
    octaves = np.log2([float(row) for row in rows])[:, None]
    octaves = octaves - np.log2([float(column) for column in columns])
    return np.exp(-((octaves / OCTAVES) ** 2) / 2)


def _expected(space: Space, candidate: Candidate) -> float:
    """What is known beforehand of the log seconds per token, up to a constant."""
    recomputes = space.named(candidate).get("gradient_checkpointing") is True
    workload = space.config(candidate).workload(space.world)
    parallel = workload.parallel
    waits = bubble(parallel.schedule, parallel.pp, workload.micro_batches, parallel.chunks)
    return (RECOMPUTING if recomputes else 0.0) - math.log(1 - waits)


def _error(point: Point) -> float:
    """Standard deviation of a trial's median, as a share of it."""
    return 1.2533 * point.spread / math.sqrt(len(point.tokens_per_second))


def _expected_improvement(gain: float, deviation: float) -> float:
    """Mean of max(0, X) for a normal X of mean `gain`."""
    if deviation == 0.0:
        return max(0.0, gain)
    ratio = gain / deviation
    density = math.exp(-(ratio**2) / 2) / math.sqrt(2 * math.pi)
    return gain * 0.5 * (1 + math.erf(ratio / math.sqrt(2))) + deviation * density
