"""What a token weighs, by hand, and that no cut into micro-batches changes the sum."""

import pytest
import torch

from step3_ppo.policy_losses import Aggregate, Weighting

LENGTHS = torch.tensor([2.0, 2.0, 3.0, 3.0, 3.0])
"""Of each token of two responses."""


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        ("token", [1 / 5] * 5),
        ("sequence", [1 / 4, 1 / 4, 1 / 6, 1 / 6, 1 / 6]),
        ("constant", [1 / 20] * 5),
    ],
)
def test_the_weights_are_those_of_the_papers(aggregate: Aggregate, expected: list[float]) -> None:
    weighting = Weighting(aggregate, num_tokens=5, num_responses=2, max_new_tokens=10)

    weights = weighting.of(LENGTHS) / weighting.num_tokens

    assert weights.tolist() == pytest.approx(expected)


def test_weighing_tokens_all_the_same_changes_no_bit() -> None:
    weighting = Weighting("token", num_tokens=5, num_responses=2, max_new_tokens=10)
    losses = torch.rand(5)

    assert torch.equal(weighting.of(LENGTHS) * losses, losses)
