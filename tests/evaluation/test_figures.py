"""Shares, pass@k and their intervals."""

from itertools import combinations

import pytest

from evaluation.figures import Figure, compute_figures, pass_at_k


def test_pass_at_k_is_the_share_of_the_subsets_that_hold_a_right_answer() -> None:
    for count in range(1, 8):
        for right in range(count + 1):
            answers = [True] * right + [False] * (count - right)
            for k in range(1, count + 1):
                subsets = list(combinations(answers, k))
                share = sum(map(any, subsets)) / len(subsets)

                assert pass_at_k(count, right, k) == pytest.approx(share, abs=1e-15)


def test_the_interval_is_wilsons() -> None:
    # 8 of 10 with z = 1.96, by hand:
    # (.8 + .19208 -+ 1.96 sqrt(.016 + .009604)) / 1.38416
    low, high = Figure("t", "m", 1, 0.8, 10, 10).interval

    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert Figure("t", "m", 1, 0.0, 10, 10).interval[0] == pytest.approx(0.0)
    assert Figure("t", "m", 1, 1.0, 10, 10).interval[1] == pytest.approx(1.0)


def test_each_thing_of_an_answer_is_graded_over_all_answers() -> None:
    first = [{"all": [False], "each": [True, False]}, {"all": [True], "each": [True, True]}]
    second = [{"all": [False], "each": [False]}, {"all": [False], "each": [False]}]

    figures = {each.name: each for each in compute_figures("t", [first, second], ks=(1, 2))}

    assert {name: each.value for name, each in figures.items()} == {
        "t_all": 0.25,
        "t_all_pass@2": 0.5,
        "t_each": pytest.approx((1 + 0.5 + 0) / 3),
        "t_each_pass@2": pytest.approx((1 + 1 + 0) / 3),
    }
    assert figures["t_each"].count == 3
    assert figures["t_each"].questions == 2
