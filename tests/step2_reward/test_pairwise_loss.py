"""The pairwise loss, against hand-computed values."""

import math

import pytest
import torch

from step2_reward.losses import pairwise_loss

CHOSEN = torch.tensor([1.0, 0.0, 3.0])
REJECTED = torch.tensor([0.0, 0.0, 5.0])


def softplus(x: float) -> float:
    return math.log(1 + math.exp(x))


def test_loss_is_the_negative_log_likelihood_of_the_choice() -> None:
    loss = pairwise_loss(CHOSEN, REJECTED)

    assert loss.item() == pytest.approx(softplus(-1) + math.log(2) + softplus(2))


def test_margin_is_subtracted_from_the_score_difference() -> None:
    loss = pairwise_loss(CHOSEN, REJECTED, margin=torch.tensor([1.0, 0.5, 0.0]))

    assert loss.item() == pytest.approx(math.log(2) + softplus(0.5) + softplus(2))


def test_centering_penalizes_the_squared_sum_of_scores() -> None:
    plain = pairwise_loss(CHOSEN, REJECTED)

    centered = pairwise_loss(CHOSEN, REJECTED, center_coef=0.1)

    assert centered.item() - plain.item() == pytest.approx(0.1 * (1 + 0 + 64), rel=1e-5)


def test_gradient_is_minus_the_probability_of_the_rejected_response() -> None:
    chosen = torch.tensor([2.0], requires_grad=True)

    pairwise_loss(chosen, torch.zeros(1)).backward()

    assert chosen.grad is not None
    assert chosen.grad.item() == pytest.approx(-1 / (1 + math.exp(2)))


def test_loss_is_finite_for_extreme_scores() -> None:
    assert pairwise_loss(torch.tensor([-500.0]), torch.tensor([500.0])).item() == 1000.0
