"""Advantage estimators: how much better each token is than expected.

Pure functions of tensors. Dimension names: B responses, T response tokens (padded; masks are True
on real tokens), P prompts, G responses per prompt. To add an estimator, add its function to
`ESTIMATORS`, its name to `step3_ppo.config`, and its requirements to `step3_ppo.methods`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def group_mean(grouped: Float[Tensor, "P G"], counted: Bool[Tensor, "P G"]) -> Float[Tensor, "P 1"]:
    """Return the mean of the counted values in each group, or 0 if there are none."""
    return _group_sum(grouped, counted) / group_counts(counted).clamp(min=1)


def group_std(grouped: Float[Tensor, "P G"], counted: Bool[Tensor, "P G"]) -> Float[Tensor, "P 1"]:
    """Return the sample standard deviation of each group's counted values; 0 for fewer than 2."""
    squares = (grouped - group_mean(grouped, counted)).square()
    return (_group_sum(squares, counted) / (group_counts(counted) - 1).clamp(min=1)).sqrt()


def all_equal(grouped: Float[Tensor, "P G"], counted: Bool[Tensor, "P G"]) -> Bool[Tensor, "P 1"]:
    """Return whether the counted values of each group are equal; fewer than two count as equal.

    The largest value is compared with the smallest, because rounding can make the differences from
    the mean, and so the standard deviation, nonzero.
    """
    largest = grouped.masked_fill(~counted, -torch.inf).amax(dim=1, keepdim=True)
    return largest <= grouped.masked_fill(~counted, torch.inf).amin(dim=1, keepdim=True)


def group_counts(counted: Bool[Tensor, "P G"]) -> Float[Tensor, "P 1"]:
    """Return the number of counted entries in each group."""
    return counted.double().sum(dim=1, keepdim=True)


def _group_sum(grouped: Float[Tensor, "P G"], counted: Bool[Tensor, "P G"]) -> Float[Tensor, "P 1"]:
    # Sorted, so that rounding does not depend on the order of the responses.
    return grouped.masked_fill(~counted, 0.0).sort(dim=1).values.sum(dim=1, keepdim=True)


STD_FLOOR = 1e-4
"""Added to the standard deviation of a group's returns."""


@dataclass(frozen=True)
class RewardedResponses:
    """Responses and their rewards; responses to the same prompt are adjacent."""

    rewards: Float[Tensor, "B T"]
    """Reward of each token, zero on padding."""

    mask: Bool[Tensor, "B T"]
    """True on the actor's tokens, but not on an environment's observations."""

    scores: Float[Tensor, " B"]
    """Score of each response, without the KL penalty."""

    values: Float[Tensor, "B T"] | None
    """A critic's value of the state before each token; None without a critic."""

    group_size: int
    """Number of responses per prompt."""

    gamma: float
    """Discount per token."""

    lam: float
    """Lambda of GAE: 1 is Monte Carlo, 0 is the one-step TD error."""

    counted: Bool[Tensor, " B"]
    """False for responses without a reward or masked as overlong: no baseline includes them, and
    their advantage is 0."""

    group_baseline: bool = False
    """Whether `reinforce_pp` first subtracts the group's mean score from each score."""


@dataclass(frozen=True)
class Estimate:
    """Targets for the policy and the critic; zero on padding."""

    advantages: Float[Tensor, "B T"]

    returns: Float[Tensor, "B T"] | None = None
    """Targets of the critic's values; None without a critic."""

    zeroed: Bool[Tensor, " B"] | None = None
    """True for responses whose advantages stay 0 under whitening; None if there are none."""


def gae_estimate(rewarded: RewardedResponses) -> Estimate:
    """Estimate advantages and returns with a critic; see `gae`."""
    assert rewarded.values is not None
    advantages, returns = gae(
        rewarded.rewards, rewarded.values, rewarded.mask, gamma=rewarded.gamma, lam=rewarded.lam
    )
    return Estimate(advantages, returns)


def gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    gamma: float,
    lam: float,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Compute generalized advantage estimates (Schulman et al. 2016, eq. 16).

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}

    `values[:, t]` is the value of the state before token t. The value after the last token is 0:
    the episode ends there, by an end-of-turn token or the length limit.

    Returns:
        (advantages, returns), both zero on padding; returns = advantages + values.
    """
    values = values * mask
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = (delta + gamma * lam * next_advantage) * mask[:, t]
        next_value, next_advantage = values[:, t], advantages[:, t]
    return advantages, advantages + values


def grpo(rewarded: RewardedResponses) -> Estimate:
    """Compute group-relative advantages (Shao et al. 2024, section 4.1.2), equal for all tokens.

        A_i = (R_i - mean R) / (std R + 1e-4)

    R_i is the sum of a response's token rewards; mean and (sample) standard deviation are over its
    group. If all scores of a group are equal, the advantages are exactly 0. Without this rule, the
    KL penalty, divided by its own small standard deviation, would count as much as a score.
    """
    grouped, counted = group_returns(rewarded), split_groups(rewarded.counted, rewarded)
    scaled = center(grouped, counted) / (group_std(grouped, counted) + STD_FLOOR)
    scores = split_groups(rewarded.scores, rewarded)
    return expand_to_tokens(scaled.masked_fill(all_equal(scores, counted), 0.0), rewarded)


def dr_grpo(rewarded: RewardedResponses) -> Estimate:
    """Compute unscaled group-relative advantages (Liu et al. 2025), equal for all tokens.

        A_i = R_i - mean R

    Groups whose rewards vary little have little weight. The expected gradient is (G - 1) / G times
    the gradient of the expected reward. A group of equal returns has advantages of exactly 0.
    """
    grouped, counted = group_returns(rewarded), split_groups(rewarded.counted, rewarded)
    return expand_to_tokens(center(grouped, counted), rewarded)


def rloo(rewarded: RewardedResponses) -> Estimate:
    """Compute leave-one-out advantages (RLOO, Ahmadian et al. 2024), equal for all tokens.

        A_i = R_i - mean of the other R_j = G / (G - 1) * (R_i - mean R)

    R_i is the sum of a response's token rewards, and G is the size of its group. The baseline does
    not depend on the response itself, so the policy gradient is unbiased. A group of equal returns
    has advantages of exactly 0.
    """
    grouped, counted = group_returns(rewarded), split_groups(rewarded.counted, rewarded)
    size = group_counts(counted)
    advantages = size / (size - 1).clamp(min=1) * center(grouped, counted)
    return expand_to_tokens(advantages, rewarded)


def reinforce_pp(rewarded: RewardedResponses) -> Estimate:
    """Compute the discounted reward-to-go, to be whitened over all tokens (REINFORCE++, Hu 2025).

    With `group_baseline`, the group's mean score is first subtracted from each score; a group of
    equal returns then has advantages of exactly 0, even after whitening.
    """
    rewards, zeroed = rewarded.rewards, ~rewarded.counted
    if rewarded.group_baseline:
        counted = split_groups(rewarded.counted, rewarded)
        scores = split_groups(rewarded.scores, rewarded)
        baseline = (scores - center(scores, counted)).flatten().to(rewards.dtype)
        last = rewarded.mask.sum(dim=1, keepdim=True) - 1
        rewards = rewards.scatter_add(1, last, -baseline[:, None])
        is_dead = all_equal(group_returns(rewarded), counted).expand_as(scores)
        zeroed = zeroed | is_dead.flatten()
    zeros = torch.zeros_like(rewards)
    advantages, _ = gae(rewards, zeros, rewarded.mask, gamma=rewarded.gamma, lam=1.0)
    return Estimate(advantages.masked_fill(zeroed[:, None], 0.0), zeroed=zeroed)


def best_of_group(rewarded: RewardedResponses) -> Estimate:
    """Assign 1 to each group's best response and 0 to the others (Dong et al., Yuan et al. 2023).

    With the loss `none`, this gives the negative log-likelihood of the best responses (RAFT). Tied
    best responses share the 1; a group of equal returns has no best response.
    """
    grouped, counted = group_returns(rewarded), split_groups(rewarded.counted, rewarded)
    eligible = grouped.masked_fill(~counted, -torch.inf)
    is_best = (eligible == eligible.amax(dim=1, keepdim=True)) & counted
    weights = is_best.double() / is_best.sum(dim=1, keepdim=True).clamp(min=1)
    return expand_to_tokens(weights.masked_fill(all_equal(grouped, counted), 0.0), rewarded)


def group_returns(rewarded: RewardedResponses) -> Float[Tensor, "P G"]:
    """Return the sum of each response's token rewards, by prompt, in float64."""
    return split_groups(rewarded.rewards.double().sum(dim=1), rewarded)


def split_groups(values: Tensor, rewarded: RewardedResponses) -> Tensor:
    """Reshape (B) to (P, G), and convert floating-point values to float64."""
    widened = values.double() if values.is_floating_point() else values
    return widened.view(-1, rewarded.group_size)


def center(grouped: Float[Tensor, "P G"], counted: Bool[Tensor, "P G"]) -> Float[Tensor, "P G"]:
    """Subtract each group's mean; the differences are exactly 0 if all values are equal."""
    deviation = grouped - group_mean(grouped, counted)
    return deviation.masked_fill(all_equal(grouped, counted), 0.0)


def expand_to_tokens(advantages: Float[Tensor, "P G"], rewarded: RewardedResponses) -> Estimate:
    """Assign each response's advantage to all its tokens, or 0 if the response isn't counted."""
    by_response = advantages.flatten().masked_fill(~rewarded.counted, 0.0)
    return Estimate(by_response.float()[:, None] * rewarded.mask)


ESTIMATORS: Mapping[str, Callable[[RewardedResponses], Estimate]] = {
    "gae": gae_estimate,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "best": best_of_group,
}
"""Estimators by the setting `advantage`."""
