"""Estimators that compare the responses to a prompt with each other."""

from fractions import Fraction
from itertools import product
from typing import get_args, get_type_hints

import pytest
import torch

from step3_ppo.advantages import ESTIMATORS, STD_FLOOR, Rewarded
from step3_ppo.config import ESTIMATOR_NEEDS, PPOConfig
from step3_ppo.policy_losses import LOSSES, TrustRegion

GROUPED = [name for name, needs in ESTIMATOR_NEEDS.items() if needs.group]


def rewarded(returns: list[float], lengths: list[int], *, group_size: int) -> Rewarded:
    """Responses whose whole reward comes with their last token."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = torch.tensor(returns)
    return Rewarded(
        rewards=rewards,
        mask=mask,
        scores=torch.tensor(returns),
        values=None,
        group_size=group_size,
        gamma=1.0,
        lam=1.0,
    )


def test_every_estimator_and_every_loss_is_a_choice_of_the_settings() -> None:
    kinds = get_type_hints(PPOConfig)

    assert set(get_args(kinds["advantage"])) == set(ESTIMATORS) == set(ESTIMATOR_NEEDS)
    assert set(get_args(kinds["loss"])) == set(LOSSES)


def test_grpo_gives_each_token_its_responses_distance_from_the_groups_mean() -> None:
    estimate = ESTIMATORS["grpo"](
        rewarded([1.0, 3.0, 5.0, 0.0, 0.0, 6.0], [2, 1, 3, 1, 2, 2], group_size=3)
    )

    # Groups (1, 3, 5) of deviation 2, and (0, 0, 6) of mean 2 and deviation sqrt(12).
    first, second = 2 / (2 + STD_FLOOR), 1 / (12**0.5 + STD_FLOOR)
    expected = torch.tensor(
        [
            [-first, -first, 0],
            [0, 0, 0],
            [first, first, first],
            [-2 * second, 0, 0],
            [-2 * second, -2 * second, 0],
            [4 * second, 4 * second, 0],
        ]
    )
    torch.testing.assert_close(estimate.advantages, expected)
    assert estimate.returns is None


def test_grpo_counts_all_rewards_of_a_response() -> None:
    spread = rewarded([2.0, 0.0], [3, 2], group_size=2)
    spread.rewards[0, 0] = -1.0  # as a KL penalty lies on every token
    at_the_end = rewarded([1.0, 0.0], [3, 2], group_size=2)

    estimates = [ESTIMATORS["grpo"](each).advantages for each in (spread, at_the_end)]

    assert torch.equal(*estimates)


@pytest.mark.parametrize("name", GROUPED)
def test_equal_rewards_teach_exactly_nothing(name: str) -> None:
    def equal(reward: float, size: int) -> Rewarded:
        responses = rewarded([reward] * 2 * size, [3, 2] * size, group_size=size)
        # As a KL penalty, so small that the mean of such returns is rounded in float64 too.
        responses.rewards[:, 0] = reward * 2**-27
        return responses

    wrong = [
        (size, reward)
        for size in range(2, 17)
        for reward in (0.1, 0.7, float(Fraction(1, 3)), -2.5)
        if ESTIMATORS[name](equal(reward, size)).advantages.any()
    ]

    assert not wrong


def test_where_scores_are_equal_grpo_does_not_blow_up_the_kl_penalty() -> None:
    equal = rewarded([1.0, 1.0], [3, 2], group_size=2)
    equal.rewards[0, 0] = -1e-3

    assert not ESTIMATORS["grpo"](equal).advantages.any()
    assert ESTIMATORS["rloo"](equal).advantages.abs().max() == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.parametrize("name", GROUPED)
def test_an_advantage_depends_on_its_own_group_alone(name: str) -> None:
    def of_first(others: list[float]) -> torch.Tensor:
        returns = [1.0, 2.0, 4.0, *others]
        return ESTIMATORS[name](rewarded(returns, [2] * 6, group_size=3)).advantages[:3]

    assert torch.equal(of_first([0.0, 0.0, 0.0]), of_first([7.0, -3.0, 100.0]))


@pytest.mark.parametrize("name", GROUPED)
def test_the_order_within_a_group_changes_nothing_else(name: str) -> None:
    forward = ESTIMATORS[name](rewarded([1.0, 2.0, 4.0], [1] * 3, group_size=3)).advantages
    backward = ESTIMATORS[name](rewarded([4.0, 2.0, 1.0], [1] * 3, group_size=3)).advantages

    torch.testing.assert_close(forward.flip(0), backward, rtol=0, atol=1e-7)


def test_grpo_does_not_see_the_zero_and_the_unit_of_rewards() -> None:
    plain = ESTIMATORS["grpo"](rewarded([0.0, 1.0, 5.0], [1] * 3, group_size=3)).advantages
    moved = ESTIMATORS["grpo"](rewarded([3.0, 5.0, 13.0], [1] * 3, group_size=3)).advantages

    torch.testing.assert_close(plain, moved, rtol=1e-4, atol=1e-4)  # but for STD_FLOOR


def test_rloo_gives_each_token_its_responses_distance_from_the_mean_of_the_others() -> None:
    estimate = ESTIMATORS["rloo"](
        rewarded([1.0, 3.0, 5.0, 0.0, 0.0, 6.0], [2, 1, 3, 1, 2, 2], group_size=3)
    )

    # The others have means (4, 3, 2) and (3, 3, 0).
    expected = torch.tensor(
        [[-3.0, -3, 0], [0, 0, 0], [3, 3, 3], [-3, 0, 0], [-3, -3, 0], [6, 6, 0]]
    )
    torch.testing.assert_close(estimate.advantages, expected, rtol=0, atol=0)
    assert estimate.returns is None


def test_rloo_of_two_responses_is_twice_the_centered_return() -> None:
    estimate = ESTIMATORS["rloo"](rewarded([1.0, 4.0, -2.0, 5.0], [1] * 4, group_size=2))

    centered = torch.tensor([[-1.5], [1.5], [-3.5], [3.5]])
    torch.testing.assert_close(estimate.advantages, 2 * centered, rtol=0, atol=0)


@pytest.mark.parametrize("group_size", [2, 3, 5])
def test_rloos_mean_gradient_is_that_of_the_expected_reward(group_size: int) -> None:
    """Over every group of responses that a policy of three actions can give, by its probability.

    Rewards are multiples of G - 1, so that advantages are whole numbers, exact in float32.
    """
    rewards = (group_size - 1) * torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)
    logits = torch.tensor([0.3, -0.5, 0.9], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(dim=0)
    groups = torch.tensor(list(product(range(3), repeat=group_size)))
    probability = logprobs.detach()[groups].sum(dim=1).exp()

    estimate = ESTIMATORS["rloo"](
        rewarded(rewards[groups].flatten().tolist(), [1] * groups.numel(), group_size=group_size)
    )
    taken = logprobs[groups].flatten()
    advantages = estimate.advantages.flatten().double()
    losses = LOSSES["none"](taken, taken.detach(), advantages, TrustRegion(0.2, 0.2))
    loss = (probability * losses.view_as(groups).mean(dim=1)).sum()

    (found,) = torch.autograd.grad(-loss, logits, retain_graph=True)
    (expected,) = torch.autograd.grad((logprobs.exp() * rewards).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
