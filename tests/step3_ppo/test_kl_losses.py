"""Every KL penalty's expected gradient, by enumeration of a small policy in float64.

The table that the settings `kl_in` and `kl_estimator` stand on: which of them holds the policy to
the reference by KL(pi || pi_ref), and which does something else.
"""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from step3_ppo.advantages import ESTIMATORS, Rewarded
from step3_ppo.losses import KL_LOSSES, TrustRegion, policy_ratio, reinforce, token_rewards

LOGITS = torch.tensor([0.3, -0.5, 0.9, -1.2], dtype=torch.float64)
REFERENCE = torch.tensor([-1.4, 1.8, 0.1, 1.2], dtype=torch.float64).log_softmax(dim=0)
OLDER = torch.tensor([0.9, 0.4, -0.2, 0.0], dtype=torch.float64).log_softmax(dim=0)


def gradient(of: Callable[[Tensor], Tensor]) -> Tensor:
    """With respect to the policy's logits, of a function of its log-probabilities."""
    logits = LOGITS.clone().requires_grad_()
    (found,) = torch.autograd.grad(of(logits.log_softmax(dim=0)), logits)
    return found


FORWARD = gradient(lambda logprobs: (logprobs.exp() * (logprobs - REFERENCE)).sum())
"""That of KL(pi || pi_ref)."""

BACKWARD = gradient(lambda logprobs: (REFERENCE.exp() * (REFERENCE - logprobs)).sum())
"""That of KL(pi_ref || pi)."""


def expected(estimator: str, drawn_by: Tensor | None = None) -> Tensor:
    """The mean gradient of a loss over the tokens that a policy draws: this one, or an older."""

    def loss(logprobs: Tensor) -> Tensor:
        old = logprobs.detach() if drawn_by is None else drawn_by
        ratio = policy_ratio(logprobs, old)
        return (old.exp() * KL_LOSSES[estimator](logprobs - REFERENCE, ratio)).sum()

    return gradient(loss)


def close(found: Tensor, target: Tensor) -> bool:
    return torch.allclose(found, target, rtol=1e-12, atol=1e-14)


def test_k2_and_k3_is_have_the_gradient_of_the_kl_and_k3_that_of_the_other() -> None:
    assert close(expected("k2"), FORWARD)
    assert close(expected("k3_is"), FORWARD)
    assert close(expected("k3"), BACKWARD)
    assert 0.5 < torch.cosine_similarity(BACKWARD, FORWARD, dim=0).item() < 0.99
    assert close(expected("k3_is", OLDER), FORWARD)  # k3_is on tokens of an older policy too
    assert not close(expected("k2", OLDER), FORWARD)


def test_k1_as_a_loss_has_no_gradient_at_all() -> None:
    """Why the settings refuse it: the mean of grad log pi over pi is 0."""
    found = gradient(lambda logprobs: (logprobs.detach().exp() * (logprobs - REFERENCE)).sum())

    assert close(found, torch.zeros_like(found))


def test_k1_in_the_reward_has_the_gradient_of_the_kl_of_whole_responses() -> None:
    """Of two tokens, the second drawn given the first; the penalty counts what comes after."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 3, dtype=torch.float64, generator=generator).requires_grad_()
    reference = torch.randn(4, 3, dtype=torch.float64, generator=generator).log_softmax(dim=1)
    logprobs = logits.log_softmax(dim=1)  # row 0 of the first token, row 1 + i after token i
    responses = torch.tensor(list(product(range(3), repeat=2)))
    rows = torch.stack([torch.zeros(9, dtype=torch.long), 1 + responses[:, 0]], dim=1)
    taken, of_reference = logprobs[rows, responses], reference[rows, responses]
    probability = taken.detach().sum(dim=1).exp()

    zeros, mask = torch.zeros(9, dtype=torch.float64), torch.ones(9, 2).bool()
    rewards = token_rewards(zeros, taken.detach(), of_reference, mask, kl_coef=1.0)
    rewarded = Rewarded(
        rewards, mask, zeros, None, group_size=1, gamma=1.0, lam=1.0, counted=mask[:, 0]
    )
    advantages = ESTIMATORS["reinforce_pp"](rewarded).advantages
    flat = taken.flatten()
    losses = reinforce(torch.ones_like(flat), flat, advantages.flatten(), TrustRegion(0.2, 0.2))
    loss = (probability[:, None] * losses.view_as(taken)).sum()

    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    whole = (taken.sum(dim=1).exp() * (taken - of_reference).sum(dim=1)).sum()
    (target,) = torch.autograd.grad(whole, logits)
    torch.testing.assert_close(found, target, rtol=1e-12, atol=1e-14)
