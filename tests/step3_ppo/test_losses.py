"""PPO's formulas, against hand-computed values and independent references."""

import math

import pytest
import torch
from torch import Tensor

from step3_ppo.advantages import gae
from step3_ppo.losses import (
    TrustRegion,
    clipped_surrogate,
    k3,
    policy_ratio,
    token_rewards,
    value_loss,
    whiten,
)

F64 = torch.float64


def make_mask(lengths: list[int], width: int) -> Tensor:
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def compute_advantages_by_definition(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> list[float]:
    """Sum over l of (gamma lambda)^l delta_{t+l} for a sequence, with value 0 after its end."""
    next_values = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, next_values, values, strict=True)]
    return [
        sum((gamma * lam) ** later * delta for later, delta in enumerate(deltas[t:]))
        for t in range(len(deltas))
    ]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7), (0.99, 0.0), (0.97, 1.0)])
def test_gae_is_the_discounted_sum_of_later_td_errors(gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 5, 7, dtype=F64, generator=generator)
    lengths = [7, 4, 1, 6, 2]

    advantages, returns = gae(rewards, values, make_mask(lengths, 7), gamma=gamma, lam=lam)

    for row, length in enumerate(lengths):
        expected = compute_advantages_by_definition(
            rewards[row, :length].tolist(), values[row, :length].tolist(), gamma, lam
        )
        torch.testing.assert_close(advantages[row, :length], torch.tensor(expected, dtype=F64))
    torch.testing.assert_close(returns, (advantages + values) * make_mask(lengths, 7))


def test_score_is_at_the_last_token_and_kl_at_every_token() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, 7.0], [-1.0, -1.0, -3.0], [-4.0, 7.0, 7.0]])
    ref_logprobs = torch.tensor([[-2.0, -2.0, 0.0], [-1.0, -2.0, -1.0], [-2.0, 0.0, 0.0]])
    score = torch.tensor([10.0, 20.0, 30.0])

    rewards = token_rewards(score, logprobs, ref_logprobs, make_mask([2, 3, 1], 3), kl_coef=0.5)

    assert rewards.tolist() == [[-0.5, 10, 0], [0, -0.5, 21], [31, 0, 0]]


def test_whitening_gives_mean_0_and_variance_1() -> None:
    generator = torch.Generator().manual_seed(0)
    values = 3 * torch.randn(4, 6, dtype=F64, generator=generator) + 7
    mask = make_mask([6, 3, 1, 4], 6)
    real = values[mask]
    mean, variance = real.mean().item(), real.var(correction=0).item()

    whitened = whiten(values, mask, mean=mean, variance=variance)

    assert whitened[mask].mean().item() == pytest.approx(0, abs=1e-12)
    assert whitened[mask].var(correction=0).item() == pytest.approx(1)
    assert not whitened[~mask].any()


def loss_at(ratio: float, advantage: float, **settings: float) -> tuple[float, float]:
    """Return the loss of one token and its gradient by the new log-probability."""
    logprobs = torch.tensor([math.log(ratio) - 1.0], dtype=F64, requires_grad=True)
    old = torch.tensor([-1.0], dtype=F64)
    region = TrustRegion(**{"clip": 0.2, "clip_high": 0.2, **settings})
    ratio = policy_ratio(logprobs, old)
    loss = clipped_surrogate(ratio, logprobs, torch.tensor([advantage], dtype=F64), region).sum()
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),  # beyond the trust region: no gradient
        (0.5, 2.0, -1.0, -1.0),  # moved the wrong way: full gradient
        (0.5, -2.0, 1.6, 0.0),
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_policy_loss_clips_only_in_the_direction_of_the_advantage(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    assert loss_at(ratio, advantage) == pytest.approx((loss, gradient))


def test_dual_clip_bounds_only_losses_of_negative_advantages() -> None:
    assert loss_at(5.0, -2.0) == pytest.approx((10.0, 10.0))
    assert loss_at(5.0, -2.0, dual_clip=3.0) == pytest.approx((6.0, 0.0))
    assert loss_at(2.0, -2.0, dual_clip=3.0) == pytest.approx((4.0, 4.0))
    assert loss_at(5.0, 2.0, dual_clip=3.0) == pytest.approx((-2.4, 0.0))


@pytest.mark.parametrize(
    ("value", "clip", "loss"),
    [
        (1.3, 0.2, 0.5 * 0.8**2),  # clipped to 1.2, farther from the return 2
        (1.1, 0.2, 0.5 * 0.9**2),
        (0.5, 0.2, 0.5 * 1.5**2),  # clipped to 0.8, nearer to the return
        (1.3, None, 0.5 * 0.7**2),
    ],
)
def test_value_loss_is_half_the_larger_squared_error(
    value: float, clip: float | None, loss: float
) -> None:
    actual = value_loss(
        torch.tensor([value, 2.0]), torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0]), clip=clip
    )

    assert actual.item() == pytest.approx(loss)


def test_k1_and_k3_are_unbiased_estimators_of_the_kl() -> None:
    policy = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=F64)
    reference = torch.tensor([0.25, 0.25, 0.4, 0.1], dtype=F64)
    divergence = sum(
        p * math.log(p / q) for p, q in zip(policy.tolist(), reference.tolist(), strict=True)
    )
    log_ratio = policy.log() - reference.log()

    assert (policy * k3(log_ratio)).sum().item() == pytest.approx(divergence)
    assert (policy * log_ratio).sum().item() == pytest.approx(divergence)
