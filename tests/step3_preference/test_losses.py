"""The losses: initial values, symmetries and stationary points."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from step3_preference.losses import (
    hinge_loss,
    ipo_loss,
    kto_loss,
    log1mexp,
    log_odds,
    nll_loss,
    orpo_loss,
    sigmoid_loss,
)

H = torch.tensor([-3.0, -0.5, 0.0, 0.25, 4.0], dtype=torch.float64)

LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "dpo": (lambda h: sigmoid_loss(h, beta=0.1), math.log(2)),
    "cdpo": (lambda h: sigmoid_loss(h, beta=0.1, label_smoothing=0.2), math.log(2)),
    "rdpo": (lambda h: sigmoid_loss(h, beta=0.1, label_smoothing=0.2, robust=True), math.log(2)),
    "ipo": (lambda h: ipo_loss(h, beta=0.1), 25.0),
    "hinge": (lambda h: hinge_loss(h, beta=0.1), 1.0),
}
"""Losses, with the value of a pair with equal log-ratios, as at the start."""


def gradient(loss: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
    leaf = h.clone().requires_grad_()
    (result,) = torch.autograd.grad(loss(leaf), leaf)
    return result


@pytest.mark.parametrize("name", LOSSES)
def test_losses_have_the_initial_value_and_are_sums(name: str) -> None:
    loss, initial = LOSSES[name]
    assert loss(torch.zeros(3, dtype=torch.float64)).item() == pytest.approx(3 * initial, abs=1e-12)
    total = sum(loss(h[None]) for h in H)
    torch.testing.assert_close(loss(H), total, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", ["dpo", "cdpo", "rdpo"])
def test_reversing_a_pair_changes_the_loss_by_the_margin(name: str) -> None:
    # -log s(x) + log s(-x) = -x, and the loss of the reversed pair is that of -h.
    loss, _ = LOSSES[name]
    slope = {"dpo": 1.0, "cdpo": 0.6, "rdpo": 1 / 0.6}[name]
    for h in H:
        change = loss(-h[None]) - loss(h[None])
        torch.testing.assert_close(change, slope * 0.1 * h, rtol=1e-12, atol=1e-14)


def test_losses_match_hand_computed_values() -> None:
    h = torch.tensor([2.0])
    assert sigmoid_loss(h, beta=0.5).item() == pytest.approx(math.log(1 + math.exp(-1)))
    simpo = sigmoid_loss(h, beta=2.5, gamma=1.375)
    assert simpo.item() == pytest.approx(math.log(1 + math.exp(-3.625)))
    assert ipo_loss(h, beta=0.1).item() == 9.0
    assert hinge_loss(h, beta=0.25).item() == 0.5
    assert hinge_loss(h, beta=1.0).item() == 0.0
    assert nll_loss(torch.tensor([-0.5, -1.5])).item() == 2.0
    orpo = orpo_loss(torch.tensor([0.5]).log(), torch.tensor([0.2]).log(), beta=0.1)
    assert orpo.item() == pytest.approx(0.1 * math.log(1 + 0.25))  # odds 1 and 1/4


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_robust_loss_averaged_over_label_noise_is_the_clean_loss(noise: float) -> None:
    def robust(h: Tensor) -> Tensor:
        return sigmoid_loss(h, beta=0.1, label_smoothing=noise, robust=True)

    for h in H:
        mean = (1 - noise) * robust(h[None]) + noise * robust(-h[None])
        torch.testing.assert_close(mean, sigmoid_loss(h[None], beta=0.1), rtol=1e-13, atol=0)


def test_dpo_gradient_vanishes_at_the_optimal_policy() -> None:
    # One prompt, three responses: at pi_ref e^(r / beta) / Z the population's gradient is zero.
    beta = 0.1
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    reward = torch.tensor([0.4, -0.1, 0.05], dtype=torch.float64)
    best = torch.log_softmax(reference + reward / beta, 0)
    logits = best.clone().requires_grad_()

    def population(logits: Tensor) -> Tensor:
        ratio = torch.log_softmax(logits, 0) - reference
        total = logits.new_zeros(())
        for a in range(3):
            for b in range(3):
                if a != b:
                    prefers_a = torch.sigmoid(reward[a] - reward[b])
                    total = total + prefers_a * sigmoid_loss((ratio[a] - ratio[b])[None], beta=beta)
        return total

    (at_optimum,) = torch.autograd.grad(population(logits), logits)
    assert at_optimum.abs().max() < 1e-15
    (at_other,) = torch.autograd.grad(population(other := (best + reward).requires_grad_()), other)
    assert at_other.abs().max() > 1e-3


def test_kto_compares_responses_with_the_reference_point() -> None:
    good, bad = torch.tensor([0.0, 3.0]), torch.tensor([0.0])
    half = kto_loss(good[:1], bad, beta=0.1, z0=0.0)
    assert half.item() == pytest.approx(1.0)  # half of both weights

    def s(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    loss = kto_loss(good, bad, beta=0.1, z0=1.0, weight_good=2.0, weight_bad=3.0)
    expected = 2 * (1 - s(-0.1)) + 2 * (1 - s(0.2)) + 3 * (1 - s(0.1))
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_log_odds_are_accurate_for_confident_responses() -> None:
    exact = torch.tensor([-30.0, -2.0, -0.7, -0.69, -0.1, -1e-3, -1e-6], dtype=torch.float64)
    truth = exact - torch.log1p(-torch.exp(exact))
    torch.testing.assert_close(log_odds(exact.float()).double(), truth, rtol=1e-5, atol=0)
    plain = torch.log1p(-torch.exp(torch.tensor([-1e-9])))
    assert plain.isinf().all()  # the case of a confident short answer
    confident = torch.tensor([-1e-9, 0.0], requires_grad=True)
    loss = orpo_loss(confident[:1], confident[1:], beta=0.1)
    loss.backward()
    assert loss.isfinite()
    assert confident.grad is not None
    assert confident.grad.isfinite().all()
    for x in (-5.0, -0.1):
        slope = gradient(lambda x: log1mexp(x).sum(), torch.tensor([x], dtype=torch.float64))
        assert slope.item() == pytest.approx(-math.exp(x) / (1 - math.exp(x)))
