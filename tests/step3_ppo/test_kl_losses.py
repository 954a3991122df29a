"""The expected gradient of every KL penalty, by enumeration of a small policy in float64.

The basis of the settings `kl_in` and `kl_estimator`: which combinations penalize
KL(pi || pi_ref), and which do something else.
"""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from step3_ppo.advantages import ESTIMATORS, RewardedResponses
from step3_ppo.losses import KL_LOSSES, TrustRegion, policy_ratio, reinforce, token_rewards

LOGITS = torch.tensor([0.3, -0.5, 0.9, -1.2], dtype=torch.float64)
REFERENCE = torch.tensor([-1.4, 1.8, 0.1, 1.2], dtype=torch.float64).log_softmax(dim=0)
OLD_POLICY = torch.tensor([0.9, 0.4, -0.2, 0.0], dtype=torch.float64).log_softmax(dim=0)


def gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradient of a function of the policy's log-probabilities, by its logits."""
    logits = LOGITS.clone().requires_grad_()
    (grad,) = torch.autograd.grad(function(logits.log_softmax(dim=0)), logits)
    return grad


KL_GRADIENT = gradient(lambda logprobs: (logprobs.exp() * (logprobs - REFERENCE)).sum())
"""The gradient of KL(pi || pi_ref)."""

REVERSE_KL_GRADIENT = gradient(lambda logprobs: (REFERENCE.exp() * (REFERENCE - logprobs)).sum())
"""The gradient of KL(pi_ref || pi)."""


def expected_gradient(estimator: str, sampler: Tensor | None = None) -> Tensor:
    """Return the mean gradient of a loss over tokens sampled by the policy, or by `sampler`."""

    def loss(logprobs: Tensor) -> Tensor:
        old = logprobs.detach() if sampler is None else sampler
        ratio = policy_ratio(logprobs, old)
        return (old.exp() * KL_LOSSES[estimator](logprobs - REFERENCE, ratio)).sum()

    return gradient(loss)


def is_close(actual: Tensor, target: Tensor) -> bool:
    return torch.allclose(actual, target, rtol=1e-12, atol=1e-14)


def test_k2_and_k3_is_have_the_kl_gradient_and_k3_the_reverse() -> None:
    assert is_close(expected_gradient("k2"), KL_GRADIENT)
    assert is_close(expected_gradient("k3_is"), KL_GRADIENT)
    assert is_close(expected_gradient("k3"), REVERSE_KL_GRADIENT)
    assert 0.5 < torch.cosine_similarity(REVERSE_KL_GRADIENT, KL_GRADIENT, dim=0).item() < 0.99
    assert is_close(expected_gradient("k3_is", OLD_POLICY), KL_GRADIENT)  # also off-policy
    assert not is_close(expected_gradient("k2", OLD_POLICY), KL_GRADIENT)


def test_k1_in_the_reward_has_the_kl_gradient_of_full_responses() -> None:
    """Responses have two dependent tokens; the penalty is a reward to go."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 3, dtype=torch.float64, generator=generator).requires_grad_()
    reference = torch.randn(4, 3, dtype=torch.float64, generator=generator).log_softmax(dim=1)
    logprobs = logits.log_softmax(dim=1)  # row 0 of the first token, row 1 + i after token i
    responses = torch.tensor(list(product(range(3), repeat=2)))
    rows = torch.stack([torch.zeros(9, dtype=torch.long), 1 + responses[:, 0]], dim=1)
    policy_logprobs, ref_logprobs = logprobs[rows, responses], reference[rows, responses]
    probability = policy_logprobs.detach().sum(dim=1).exp()

    zeros, mask = torch.zeros(9, dtype=torch.float64), torch.ones(9, 2).bool()
    rewards = token_rewards(zeros, policy_logprobs.detach(), ref_logprobs, mask, kl_coef=1.0)
    rewarded = RewardedResponses(
        rewards, mask, zeros, None, group_size=1, gamma=1.0, lam=1.0, counted=mask[:, 0]
    )
    advantages = ESTIMATORS["reinforce_pp"](rewarded).advantages
    flat = policy_logprobs.flatten()
    losses = reinforce(torch.ones_like(flat), flat, advantages.flatten(), TrustRegion(0.2, 0.2))
    loss = (probability[:, None] * losses.view_as(policy_logprobs)).sum()

    (actual,) = torch.autograd.grad(loss, logits, retain_graph=True)
    kl = (policy_logprobs.sum(dim=1).exp() * (policy_logprobs - ref_logprobs).sum(dim=1)).sum()
    (target,) = torch.autograd.grad(kl, logits)
    torch.testing.assert_close(actual, target, rtol=1e-12, atol=1e-14)
