"""Win rates, what length explains of them, and Bradley-Terry strengths."""

import math

import numpy as np
import pytest

from evaluation.comparison import (
    Match,
    length_controlled,
    strengths,
)


def match(ours: int, theirs: int, *points: float) -> Match:
    return Match(ours, theirs, np.array(points), np.zeros(len(points)))


def test_what_is_not_known_is_in_no_figure() -> None:
    found = match(1, 0, 1.0, 1.0, 0.5, 0.0, math.nan)

    assert found.win_rate == 0.625
    assert found.counts == (2, 1, 1)
    # "Wald + 2" for 2 gained and 1 lost of 4: 1/6 -+ 1.96 sqrt(4 - 1/6) / 6, halved about 1/2
    low, high = found.interval
    assert (low, high) == (pytest.approx(0.2635, abs=1e-3), pytest.approx(0.9032, abs=1e-3))


def test_two_models_have_the_strengths_of_the_closed_form() -> None:
    """s_0 - s_1 = log(w / l), with half a win and half a loss more."""
    for points in ([1.0] * 6 + [0.0] * 3, [1.0, 0.5, 0.5, 0.0], [1.0] * 20):
        wins = sum(points) + 0.5
        losses = len(points) - sum(points) + 0.5

        first, second = strengths([match(0, 1, *points)], 2)

        assert first - second == pytest.approx(math.log(wins / losses), abs=1e-9)
        assert first + second == pytest.approx(0.0, abs=1e-12)


def test_strengths_of_three_models_are_where_the_likelihood_is_largest() -> None:
    """At the maximum the expected points of each model are those that it has."""
    found = [
        match(1, 0, *[1.0] * 7, *[0.0] * 3),
        match(2, 0, *[1.0] * 9, 0.0),
        match(2, 1, *[1.0] * 6, *[0.5] * 4),
    ]

    strength = strengths(found, 3)

    points, expected = np.zeros(3), np.zeros(3)
    for each in found:
        won, count = each.known.sum() + 0.5, len(each.known) + 1
        chance = 1 / (1 + math.exp(strength[each.theirs] - strength[each.ours]))
        points[each.ours] += won
        points[each.theirs] += count - won
        expected[each.ours] += count * chance
        expected[each.theirs] += count * (1 - chance)
    np.testing.assert_allclose(points, expected, atol=1e-9)
    assert strength[2] > strength[1] > strength[0]


def test_a_preference_for_length_alone_is_taken_out() -> None:
    """A judge that prefers the longer answer, of a model that writes longer ones."""
    random = np.random.default_rng(0)
    longer = random.normal(50.0, 100.0, size=2000)
    by_length = (longer > 0).astype(float)

    assert by_length.mean() > 0.65
    assert length_controlled(by_length, longer) == pytest.approx(0.5, abs=0.02)
