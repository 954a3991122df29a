"""Policy losses other than PPO's, against hand-computed values."""

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from step3_ppo.losses import LOSSES, TrustRegion, correction_weights

F64 = torch.float64
MASK = torch.tensor([[True, True, False], [True, True, True]])
REGION = TrustRegion(clip=0.2, clip_high=0.3)


def losses_at(
    name: str, log_ratios: list[float], advantages: list[float]
) -> tuple[list[float], list[float]]:
    """Return the losses of `MASK`'s tokens at old log-probabilities of -2, and their gradients."""
    old = torch.full((5,), -2.0, dtype=F64)
    logprobs = (old + torch.tensor(log_ratios, dtype=F64)).requires_grad_()
    policy_loss = LOSSES[name]
    ratio = policy_loss.ratio(logprobs, old, MASK)
    losses = policy_loss.losses(ratio, logprobs, torch.tensor(advantages, dtype=F64), REGION)
    losses.sum().backward()
    assert logprobs.grad is not None
    return losses.tolist(), logprobs.grad.tolist()


def test_gradient_without_trust_region_is_the_advantage() -> None:
    losses, gradients = losses_at("none", [0.5, -1.0, 0.0, 3.0, 0.2], [1.0, -2.0, 0.5, 4.0, 0.0])

    assert losses == pytest.approx([1.5, -6.0, 1.0, -4.0, 0.0])
    assert gradients == [-1.0, 2.0, -0.5, -4.0, 0.0]


def test_gspo_clips_the_geometric_mean_of_the_ratios() -> None:
    first, second = math.log(1.1), math.log(1.5)
    ratios = [2 * first, 0.0, 3 * second, 0.0, 0.0]  # means 1.1 and 1.5

    losses, gradients = losses_at("gspo", ratios, [1.0, 1.0, 2.0, 2.0, 2.0])

    assert losses == pytest.approx([-1.1, -1.1, -2.6, -2.6, -2.6])  # 1.5 is clipped to 1.3
    assert gradients == pytest.approx([-1.1, -1.1, 0.0, 0.0, 0.0])


def test_gspo_gradient_is_that_of_the_sequence_ratio() -> None:
    """The token form sums to the gradient of eq. 5."""
    log_ratios = torch.tensor([0.1, -0.05, 0.02, 0.04, -0.03], dtype=F64, requires_grad=True)
    loss = -log_ratios[:2].mean().exp() + 2 * log_ratios[2:].mean().exp()
    (expected,) = torch.autograd.grad(loss, log_ratios)

    _, gradients = losses_at("gspo", log_ratios.tolist(), [1.0, 1.0, -2.0, -2.0, -2.0])

    shares = [1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3]
    actual = [share * grad for share, grad in zip(shares, gradients, strict=True)]
    assert actual == pytest.approx(expected.tolist())


def test_cispo_bounds_token_weights_and_keeps_gradients() -> None:
    ratios = [math.log(1.1), math.log(3.0), math.log(0.2), 0.0, math.log(3.0)]

    losses, gradients = losses_at("cispo", ratios, [1.0, 1.0, 1.0, -2.0, -2.0])

    weights = [1.1, 1.3, 0.2, 1.0, 1.3]  # bounded above 1.3, unchanged below 1
    assert gradients == pytest.approx(
        [-w * a for w, a in zip(weights, [1, 1, 1, -2, -2], strict=True)]
    )
    assert losses[3] == pytest.approx(2 * -2.0)


def test_correction_weights_match_hand_computed_values() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    ratios = torch.tensor([[4.0, 1.0, 0.4], [0.5, 9.0, 9.0]])
    sampled = torch.full_like(ratios, -1.0)

    def weights(
        correction: Literal["truncate", "mask"], level: Literal["token", "sequence"]
    ) -> Tensor:
        return correction_weights(
            sampled + ratios.log(), sampled, mask, correction=correction, level=level, cap=2.0
        )

    mean = 1.6 ** (1 / 3)  # the geometric mean of the first response
    torch.testing.assert_close(
        weights("truncate", "token"), torch.tensor([[2, 1, 0.4], [0.5, 1, 1]])
    )
    torch.testing.assert_close(weights("mask", "token")[0], torch.tensor([0, 1.0, 0]))
    torch.testing.assert_close(
        weights("truncate", "sequence"), torch.tensor([[mean, mean, mean], [0.5, 1, 1]])
    )
