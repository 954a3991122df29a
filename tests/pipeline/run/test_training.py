"""The frequency of evaluations in training steps."""

import math

import pytest

from pipeline.run.training import MAX_EVAL_FRACTION, MAX_EVALUATIONS, evaluation_interval


@pytest.mark.parametrize(
    ("every", "total_steps", "cost", "expected"),
    [
        (None, 800, 256 / 32 / 3, 80),  # ten evaluations cost as much as 27 of 800 steps
        (None, 1600, 768 / 16 / 3, 200),  # 8% of 1600 steps are eight times 16 steps
        (None, 40, 0.4, 5),
        (None, 4, 0.25, 4),  # one would cost 6%, and the last one is due anyway
        (0, 800, 1.0, 800),
        (7, 800, 1e9, 7),  # the setting applies at any cost
    ],
)
def test_evaluation_interval_is_computed_from_the_cost(
    every: int | None, total_steps: int, cost: float, expected: int
) -> None:
    assert evaluation_interval(every, total_steps=total_steps, cost=cost) == expected


def test_default_evaluations_are_few_and_cheap() -> None:
    for total_steps in (1, 3, 17, 100, 12_345):
        for cost in (1e-3, 0.3, 2.0, 50.0):
            every = evaluation_interval(None, total_steps=total_steps, cost=cost)
            num_before_last = math.ceil(total_steps / every) - 1

            assert num_before_last < MAX_EVALUATIONS
            assert num_before_last * cost <= MAX_EVAL_FRACTION * total_steps
