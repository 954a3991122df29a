"""Accuracy, pass@k and their confidence intervals."""

from itertools import combinations

import pytest

from evaluation.figures import TaskMetric, compute_metrics, pass_at_k


def test_pass_at_k_is_the_fraction_of_subsets_with_a_correct_answer() -> None:
    for count in range(1, 8):
        for correct in range(count + 1):
            grades = [True] * correct + [False] * (count - correct)
            for k in range(1, count + 1):
                subsets = list(combinations(grades, k))
                fraction = sum(map(any, subsets)) / len(subsets)

                assert pass_at_k(count, correct, k) == pytest.approx(fraction, abs=1e-15)


def test_confidence_interval_is_wilsons() -> None:
    # 8 of 10 with z = 1.96, by hand:
    # (.8 + .19208 -+ 1.96 sqrt(.016 + .009604)) / 1.38416
    low, high = TaskMetric("t", "m", 1, 0.8, 10, 10).interval

    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))


def test_several_grades_per_answer_are_averaged() -> None:
    first = [{"all": [False], "each": [True, False]}, {"all": [True], "each": [True, True]}]
    second = [{"all": [False], "each": [False]}, {"all": [False], "each": [False]}]

    figures = {figure.name: figure for figure in compute_metrics("t", [first, second], ks=(1, 2))}

    assert {name: figure.value for name, figure in figures.items()} == {
        "t_all": 0.25,
        "t_all_pass@2": 0.5,
        "t_each": pytest.approx((1 + 0.5 + 0) / 3),
        "t_each_pass@2": pytest.approx((1 + 1 + 0) / 3),
    }
    assert figures["t_each"].count == 3
    assert figures["t_each"].questions == 2
