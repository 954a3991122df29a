"""Win rates, and what length explains of them."""

import math

import numpy as np
import pytest

from evaluation.comparison import Match, length_controlled


def match(ours: int, theirs: int, *points: float) -> Match:
    return Match(ours, theirs, np.array(points), np.zeros(len(points)))


def test_what_is_not_known_is_in_no_figure() -> None:
    found = match(1, 0, 1.0, 1.0, 0.5, 0.0, math.nan)

    assert found.win_rate == 0.625
    assert found.counts == (2, 1, 1)
    # "Wald + 2" for 2 gained and 1 lost of 4: 1/6 -+ 1.96 sqrt(4 - 1/6) / 6, halved about 1/2
    low, high = found.interval
    assert (low, high) == (pytest.approx(0.2635, abs=1e-3), pytest.approx(0.9032, abs=1e-3))


def test_a_preference_for_length_alone_is_taken_out() -> None:
    """A judge that prefers the longer answer, of a model that writes longer ones."""
    random = np.random.default_rng(0)
    longer = random.normal(50.0, 100.0, size=2000)
    by_length = (longer > 0).astype(float)

    assert by_length.mean() > 0.65
    assert length_controlled(by_length, longer) == pytest.approx(0.5, abs=0.02)
