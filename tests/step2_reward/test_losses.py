"""Losses with neutral settings, and against hand-computed values."""

import math

import pytest
import torch
import torch.nn.functional as F

from step2_reward.losses import binary_cross_entropy, cross_entropy, pairwise_loss, squared_error

GENERATOR = torch.Generator().manual_seed(0)
CHOSEN, REJECTED = torch.randn(2, 50, generator=GENERATOR) * 3
LOGITS = torch.randn(50, 4, generator=GENERATOR)
CLASSES = torch.randint(0, 4, (50,), generator=GENERATOR)
BETTER, WORSE = torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0.0, 0.0, 5.0])


def softplus(x: float) -> float:
    return math.log(1 + math.exp(x))


def test_neutral_pair_losses_equal_bradley_terry_bitwise() -> None:
    plain, zeros = pairwise_loss(CHOSEN, REJECTED), torch.zeros(50)

    assert torch.equal(pairwise_loss(CHOSEN, REJECTED, margin=zeros), plain)
    assert torch.equal(pairwise_loss(CHOSEN, REJECTED, focal_gamma=0.0), plain)
    against_0 = binary_cross_entropy(CHOSEN, torch.ones(50))
    assert torch.equal(against_0, pairwise_loss(CHOSEN, zeros))


def test_neutral_class_losses_equal_cross_entropy_bitwise() -> None:
    plain = cross_entropy(LOGITS, CLASSES)

    assert plain.item() == pytest.approx(
        F.cross_entropy(LOGITS, CLASSES, reduction="sum").item(), rel=1e-6
    )
    assert torch.equal(cross_entropy(LOGITS, CLASSES, focal_gamma=0.0), plain)
    assert torch.equal(cross_entropy(LOGITS, CLASSES, weights=torch.ones(4)), plain)


def test_focal_loss_matches_hand_computed_values() -> None:
    logits = torch.tensor([[0.0, math.log(3)]])  # p = 1/4, 3/4
    weights = torch.tensor([2.0, 1.0])

    easy = cross_entropy(logits, torch.tensor([1]), weights=weights, focal_gamma=2.0)
    hard = cross_entropy(logits, torch.tensor([0]), weights=weights, focal_gamma=2.0)

    assert easy.item() == pytest.approx(0.25**2 * math.log(4 / 3), rel=1e-6)
    assert hard.item() == pytest.approx(2 * 0.75**2 * math.log(4), rel=1e-6)
    pair = pairwise_loss(torch.tensor([math.log(3)]), torch.zeros(1), focal_gamma=2.0)
    assert pair.item() == pytest.approx(0.25**2 * math.log(4 / 3), rel=1e-6)


def test_regression_losses_match_hand_computed_values() -> None:
    assert squared_error(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 3.0])).item() == 0.5
    half = binary_cross_entropy(torch.tensor([2.0]), torch.tensor([0.5]))
    assert half.item() == pytest.approx(0.5 * softplus(-2) + 0.5 * softplus(2), rel=1e-6)


def test_pair_losses_match_hand_computed_values() -> None:
    plain = pairwise_loss(BETTER, WORSE).item()
    assert plain == pytest.approx(softplus(-1) + math.log(2) + softplus(2))
    loss = pairwise_loss(BETTER, WORSE, margin=torch.tensor([1.0, 0.5, 0.0]))
    assert loss.item() == pytest.approx(math.log(2) + softplus(0.5) + softplus(2))
    centered = pairwise_loss(BETTER, WORSE, center_coef=0.1)
    assert centered.item() - plain == pytest.approx(0.1 * (1 + 0 + 64), rel=1e-5)
    assert pairwise_loss(torch.tensor([-500.0]), torch.tensor([500.0])).item() == 1000.0
