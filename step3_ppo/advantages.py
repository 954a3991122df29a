"""Advantage estimators: how much better each token did than was to be expected.

Pure functions of tensors. Dimension names: B responses, T response tokens (padded; masks are True
on real tokens). A new estimator is a function, an entry in `ESTIMATORS`, and a name with what it
needs in `step3_ppo.config`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

STD_FLOOR = 1e-4
"""Added to the standard deviation of a group's returns."""


@dataclass(frozen=True)
class Rewarded:
    """Responses with their rewards; those to the same prompt are neighbours."""

    rewards: Float[Tensor, "B T"]
    """Of each token, zero on padding."""

    mask: Bool[Tensor, "B T"]

    scores: Float[Tensor, " B"]
    """Of each response, without the KL penalty."""

    values: Float[Tensor, "B T"] | None
    """A critic's value of the state before each token, where there is a critic."""

    group_size: int
    """Responses to each prompt."""

    gamma: float
    """Discount per token."""

    lam: float
    """The trade-off of GAE."""


@dataclass(frozen=True)
class Estimate:
    """What the policy learns from, and a critic; zero on padding."""

    advantages: Float[Tensor, "B T"]

    returns: Float[Tensor, "B T"] | None = None
    """What the critic's values should have been; None without a critic."""


def gae_estimate(rewarded: Rewarded) -> Estimate:
    """Generalized advantage estimation with a critic, as `gae`."""
    assert rewarded.values is not None
    advantages, returns = gae(
        rewarded.rewards,
        rewarded.values,
        rewarded.mask,
        gamma=rewarded.gamma,
        lam=rewarded.lam,
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
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16).

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}

    `values[:, t]` is the value of the state before token t. The value after the last token is 0:
    the episode ends there, by its end-of-turn token or by the length limit.

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


def grpo(rewarded: Rewarded) -> Estimate:
    """Group-relative advantages (Shao et al. 2024, section 4.1.2), the same for every token.

        A_i = (R_i - mean R) / (std R + 1e-4)

    R_i is the sum of a response's token rewards; mean and (sample) standard deviation are those of
    its group. Where all scores of a group are equal the advantages are exactly 0: the KL penalty
    alone, divided by its own small deviation, would weigh as much as a score.
    """
    grouped = returns_by_group(rewarded)
    scaled = centered(grouped) / (grouped.std(dim=1, keepdim=True) + STD_FLOOR)
    scores = rewarded.scores.view(-1, rewarded.group_size)
    return Estimate(of_every_token(scaled.masked_fill(are_equal(scores), 0.0), rewarded.mask))


def rloo(rewarded: Rewarded) -> Estimate:
    """REINFORCE leave-one-out (Ahmadian et al. 2024), the same for every token.

        A_i = R_i - mean of the other R_j = G / (G - 1) * (R_i - mean R)

    R_i is the sum of a response's token rewards, G the size of its group. The other responses say
    nothing about this one, so the policy gradient is unbiased. Responses of a group with equal
    returns have an advantage of exactly 0.
    """
    size = rewarded.group_size
    advantages = size / (size - 1) * centered(returns_by_group(rewarded))
    return Estimate(of_every_token(advantages, rewarded.mask))


def returns_by_group(rewarded: Rewarded) -> Float[Tensor, "P G"]:
    """The sum of each response's token rewards, by prompt, in float64."""
    return rewarded.rewards.double().sum(dim=1).view(-1, rewarded.group_size)


def centered(grouped: Float[Tensor, "P G"]) -> Float[Tensor, "P G"]:
    """The distance of each return from its group's mean, exactly 0 where all returns are equal.

    A difference from the mean is not exactly 0 after rounding.
    """
    return (grouped - grouped.mean(dim=1, keepdim=True)).masked_fill(are_equal(grouped), 0.0)


def are_equal(grouped: Float[Tensor, "P G"]) -> Bool[Tensor, "P 1"]:
    """Whether all numbers of a group are the same."""
    return grouped.amax(dim=1, keepdim=True) == grouped.amin(dim=1, keepdim=True)


def of_every_token(
    advantages: Float[Tensor, "P G"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """The advantage of a response at each of its tokens."""
    return advantages.flatten().float()[:, None] * mask


ESTIMATORS: Mapping[str, Callable[[Rewarded], Estimate]] = {
    "gae": gae_estimate,
    "grpo": grpo,
    "rloo": rloo,
}
"""By the setting `advantage`."""
