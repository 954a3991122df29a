"""Advantage estimators that compare the responses to a prompt."""

from fractions import Fraction
from typing import Any

import pytest
import torch

from step3_ppo.advantages import ESTIMATORS, STD_FLOOR, RewardedResponses
from step3_ppo.methods import ESTIMATOR_NEEDS

GROUP_ESTIMATORS = [name for name, needs in ESTIMATOR_NEEDS.items() if needs.group]


def make_rewarded(
    returns: list[float],
    lengths: list[int],
    *,
    group_size: int,
    counted: list[bool] | None = None,
    group_baseline: bool = False,
) -> RewardedResponses:
    """Return responses with the full reward at their last token."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = torch.tensor(returns)
    return RewardedResponses(
        rewards=rewards,
        mask=mask,
        scores=torch.tensor(returns),
        values=None,
        group_size=group_size,
        gamma=1.0,
        lam=1.0,
        counted=torch.tensor(counted or [True] * len(returns)),
        group_baseline=group_baseline,
    )


def estimate_returns(name: str, returns: list[float], **settings: Any) -> list[float]:
    """Return advantages of responses of one token."""
    rows = make_rewarded(returns, [1] * len(returns), **settings)
    return ESTIMATORS[name](rows).advantages.flatten().tolist()


def test_grpo_advantage_is_the_normalized_distance_from_group_mean() -> None:
    rows = make_rewarded([1.0, 3.0, 5.0, 0.0, 0.0, 6.0], [2, 1, 3, 1, 2, 2], group_size=3)
    estimate = ESTIMATORS["grpo"](rows)

    # Groups (1, 3, 5) of deviation 2, and (0, 0, 6) of mean 2 and deviation sqrt(12).
    first, second = 2 / (2 + STD_FLOOR), 1 / (12**0.5 + STD_FLOOR)
    expected = torch.tensor([-first, 0, first, -2 * second, -2 * second, 4 * second])
    torch.testing.assert_close(estimate.advantages, expected[:, None] * rows.mask)
    assert estimate.returns is None


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_equal_rewards_give_advantages_of_exactly_0(name: str) -> None:
    def equal(reward: float, size: int) -> RewardedResponses:
        responses = make_rewarded([reward] * 2 * size, [3, 2] * size, group_size=size)
        # Like a KL penalty, so small that the mean of such returns is rounded even in float64.
        responses.rewards[:, 0] = reward * 2**-27
        return responses

    non_zero = [
        (size, reward)
        for size in range(2, 17)
        for reward in (0.1, 0.7, float(Fraction(1, 3)), -2.5)
        if ESTIMATORS[name](equal(reward, size)).advantages.any()
    ]

    assert not non_zero


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_advantages_depend_only_on_their_group(name: str) -> None:
    def first_group(others: list[float]) -> torch.Tensor:
        returns = [1.0, 2.0, 4.0, *others]
        return ESTIMATORS[name](make_rewarded(returns, [2] * 6, group_size=3)).advantages[:3]

    assert torch.equal(first_group([0.0, 0.0, 0.0]), first_group([7.0, -3.0, 100.0]))


def test_rloo_advantage_is_the_distance_from_the_others_mean() -> None:
    rows = make_rewarded([1.0, 3.0, 5.0, 0.0, 0.0, 6.0], [2, 1, 3, 1, 2, 2], group_size=3)
    estimate = ESTIMATORS["rloo"](rows)

    # The others have means (4, 3, 2) and (3, 3, 0).
    expected = torch.tensor(
        [[-3.0, -3, 0], [0, 0, 0], [3, 3, 3], [-3, 0, 0], [-3, -3, 0], [6, 6, 0]]
    )
    torch.testing.assert_close(estimate.advantages, expected, rtol=0, atol=0)
    assert estimate.returns is None


def test_dr_grpo_matches_hand_computed_values_and_half_of_rloo() -> None:
    returns = [1.0, 4.0, -2.0, 5.0]

    assert estimate_returns("dr_grpo", returns, group_size=4) == [-1.0, 2.0, -4.0, 3.0]
    pairs = estimate_returns("dr_grpo", returns, group_size=2)
    assert estimate_returns("rloo", returns, group_size=2) == [2 * value for value in pairs]


def test_reinforce_pp_advantage_is_the_reward_to_go() -> None:
    responses = make_rewarded([2.0, 1.0], [3, 2], group_size=1)
    responses.rewards[:, 0] = -1.0  # like a KL penalty on every token

    estimate = ESTIMATORS["reinforce_pp"](responses)

    assert estimate.advantages.tolist() == [[1.0, 2.0, 2.0], [0.0, 1.0, 0.0]]
    assert estimate.returns is None


@pytest.mark.parametrize("name", [*GROUP_ESTIMATORS, "reinforce_pp"])
def test_response_without_reward_is_excluded_from_baselines(name: str) -> None:
    settings = {"group_baseline": name == "reinforce_pp"}
    of_three = estimate_returns(name, [1.0, 2.0, 6.0], group_size=3, **settings)
    counted = [True, False, True, True]

    of_four = estimate_returns(
        name, [1.0, 999.0, 2.0, 6.0], group_size=4, counted=counted, **settings
    )
    of_one = estimate_returns(name, [3.0, 999.0], group_size=2, counted=[True, False], **settings)

    assert of_four == [of_three[0], 0.0, of_three[1], of_three[2]]
    assert of_one == [0.0, 0.0]  # a single response can't be compared
