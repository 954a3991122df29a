"""Win rates and their control for length."""

import math

import numpy as np
import pytest

from evaluation.comparison import Match, length_controlled


def test_unknown_scores_are_excluded_from_win_rate_and_interval() -> None:
    match = Match(1, 0, np.array([1.0, 1.0, 0.5, 0.0, math.nan]), np.zeros(5))

    assert match.win_rate == 0.625
    assert match.counts == (2, 1, 1)
    # "Wald + 2" for 2 gained and 1 lost of 4: 1/6 -+ 1.96 sqrt(4 - 1/6) / 6, halved about 1/2
    low, high = match.interval
    assert (low, high) == (pytest.approx(0.2635, abs=1e-3), pytest.approx(0.9032, abs=1e-3))


def test_length_control_removes_a_pure_length_preference() -> None:
    """The judge prefers longer answers, and the model writes longer ones."""
    random = np.random.default_rng(0)
    length_differences = random.normal(50.0, 100.0, size=2000)
    points = (length_differences > 0).astype(float)

    assert points.mean() > 0.65
    assert length_controlled(points, length_differences) == pytest.approx(0.5, abs=0.02)
