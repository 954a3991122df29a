"""The model of throughput, against numbers found by hand."""

import math

import numpy as np
import pytest

from pipeline.autotune.points import Point
from pipeline.autotune.space import make_space
from pipeline.autotune.throughput import fit, most_promising
from pipeline.budget.machine import Machine
from step1_sft.config import SFTConfig

SPACE = make_space(SFTConfig(batch_size=8, micro_batch_size=1), Machine(1, 1, None, None))
"""Recomputing or not, micro-batches of 1, 2, 4 and 8."""


def measured(recomputes: bool, size: int, *rates: float) -> Point:
    return Point(
        step="step1_sft",
        key="",
        settings={"gradient_checkpointing": recomputes, "micro_batch_size": size},
        outcome="measured",
        tokens_per_second=rates,
    )


def test_what_is_not_correlated_with_anything_is_expected_at_the_mean() -> None:
    among, between = np.eye(2), np.array([[0.0, 0.0], [1.0, 0.0]])

    mean, deviation = fit(among, between, np.array([1.0, 3.0]), noise=0.0)

    # Values 1 and 3: mean 2, variance 1. The second row is the first candidate itself.
    np.testing.assert_allclose(mean, [2.0, 1.0])
    np.testing.assert_allclose(deviation, [1.0, 0.0], atol=1e-12)


def test_noise_draws_an_estimate_half_way_to_the_mean() -> None:
    mean, deviation = fit(np.eye(2), np.eye(2), np.array([1.0, 3.0]), noise=1.0)

    # The weight of a measurement is variance / (variance + noise^2), one half.
    np.testing.assert_allclose(mean, [1.5, 2.5])
    np.testing.assert_allclose(deviation, [math.sqrt(0.5)] * 2)


def test_of_equal_candidates_the_first_on_the_ladder_is_taken() -> None:
    # Nothing is measured, or all that is known is the same.
    assert most_promising(SPACE, SPACE.candidates, []) == (False, 1)


def test_recomputing_is_expected_to_be_slower_before_it_was_tried() -> None:
    left = [(True, 8), (False, 8)]

    assert most_promising(SPACE, left, [measured(False, 1, 100.0)]) == (False, 8)


def test_a_gain_by_size_is_expected_to_go_on() -> None:
    left = [(False, 4), (True, 1), (True, 2)]

    points = [measured(False, 1, 100.0), measured(False, 2, 150.0)]

    assert most_promising(SPACE, left, points) == (False, 4)


def test_a_point_without_a_measurement_teaches_nothing() -> None:
    failed = Point(
        step="step1_sft",
        key="",
        settings={"gradient_checkpointing": False, "micro_batch_size": 8},
        outcome="failed",
    )
    points = [measured(False, 1, 100.0)]
    left = [each for each in SPACE.candidates if each not in ((False, 1), (False, 8))]

    assert most_promising(SPACE, left, [*points, failed]) == most_promising(SPACE, left, points)
    assert most_promising(SPACE, left, [failed]) == left[0]


@pytest.mark.parametrize("rates", [(100.0,), (100.0, 100.0, 100.0)])
def test_measurements_without_a_spread_are_not_taken_for_exact(rates: tuple[float, ...]) -> None:
    points = [measured(False, 1, *rates), measured(False, 2, *rates)]

    assert most_promising(SPACE, [(False, 4), (True, 4)], points) == (False, 4)
