"""Shared by the training steps: the frequency of evaluations."""

import math

import pytest

from pipeline.run.training import EVALUATIONS, SHARE, evaluation_interval


@pytest.mark.parametrize(
    ("every", "total_steps", "cost", "expected"),
    [
        (None, 800, 256 / 32 / 3, 80),  # ten evaluations are 27 steps' work of 800
        (None, 1600, 768 / 16 / 3, 200),  # 8 % of 1600 steps pay for eight of sixteen steps each
        (None, 40, 0.4, 5),
        (None, 4, 0.25, 4),  # one would be 6 %, and the last is due anyway
        (0, 800, 1.0, 800),
        (7, 800, 1e9, 7),  # a requested option applies, whatever it costs
    ],
)
def test_an_evaluation_is_due_after_so_many_steps(
    every: int | None, total_steps: int, cost: float, expected: int
) -> None:
    assert evaluation_interval(every, total_steps=total_steps, cost=cost) == expected


def test_chosen_evaluations_are_few_and_cheap_whatever_the_run() -> None:
    for total_steps in (1, 3, 17, 100, 12_345):
        for cost in (1e-3, 0.3, 2.0, 50.0):
            every = evaluation_interval(None, total_steps=total_steps, cost=cost)
            before_the_last = math.ceil(total_steps / every) - 1

            assert before_the_last < EVALUATIONS
            assert before_the_last * cost <= SHARE * total_steps
