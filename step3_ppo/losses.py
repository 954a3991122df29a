"""The mathematics of RL on token sequences: pure functions of tensors, without models or settings.

Advantages are in `step3_ppo.advantages`. Losses are sums; the caller divides by the token count of
the whole optimizer step over all processes. Conventions follow Ziegler et al. 2019 and Ouyang et
al. 2022.

Dimension names: B responses, T response tokens (padded; masks are True on real tokens), K response
tokens without padding.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this value before exp, so that the result is finite in fp32."""


def token_rewards(
    score: Float[Tensor, " B"],
    logprobs: Float[Tensor, "B T"],
    ref_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    kl_coef: float,
) -> Float[Tensor, "B T"]:
    """Return the rewards: -kl_coef * KL at every token, plus the score at the last one.

    The KL is the k1 estimate, log pi - log pi_ref (Schulman 2020, "Approximating KL Divergence").
    Rewards are zero on padding. Every response must have at least one token.
    """
    rewards = -kl_coef * (logprobs - ref_logprobs) * mask
    last = mask.sum(dim=1, keepdim=True) - 1  # (B, 1) index of the final response token
    return rewards.scatter_add(1, last, score[:, None])


def whiten(
    values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, mean: float, variance: float
) -> Float[Tensor, "B T"]:
    """Return (x - mean) / sqrt(variance + 1e-8) on real tokens, and 0 on padding.

    `mean` and (biased) `variance` are over all processes.
    """
    return (values - mean) * (variance + 1e-8) ** -0.5 * mask


def policy_ratio(
    logprobs: Float[Tensor, " K"], old_logprobs: Float[Tensor, " K"]
) -> Float[Tensor, " K"]:
    """Return pi(token) / pi_old(token)."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def value_loss(
    values: Float[Tensor, " K"],
    old_values: Float[Tensor, " K"],
    returns: Float[Tensor, " K"],
    *,
    clip: float | None,
    counted: Float[Tensor, " K"] | None = None,
) -> Float[Tensor, ""]:
    """Return half the larger of the clipped and unclipped squared errors, summed over tokens.

    The clipped value stays within `clip` of `old_values`, the critic's estimate at rollout time.
    Tokens for which `counted` is 0 contribute nothing.
    """
    error = (values - returns).square()
    if clip is not None:
        clipped_values = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.max(error, (clipped_values - returns).square())
    return 0.5 * (error if counted is None else error * counted).sum()


def overlong_penalty(
    lengths: Float[Tensor, " B"], *, limit: int, buffer: float
) -> Float[Tensor, " B"]:
    """Return the soft penalty to add to the rewards of long responses (Yu et al. 2025, eq. 13).

    It is 0 up to `limit` - `buffer` tokens, then falls linearly to -1 at `limit`.
    """
    return ((limit - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def k2(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return d^2 / 2 for d = log pi - log pi_ref (Schulman 2020).

    On tokens drawn from pi, its expected gradient is that of KL(pi || pi_ref).
    """
    return 0.5 * log_ratio.square()


def k3(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return exp(-d) - 1 + d for d = log pi - log pi_ref (Schulman 2020).

    For tokens drawn from pi, this is a nonnegative estimate of KL(pi || pi_ref).
    """
    # Clamp only one side: where a token is very unlikely under pi_ref, the gradient must remain.
    log_ratio = log_ratio.clamp(min=-MAX_LOG_RATIO)
    return (-log_ratio).exp() - 1 + log_ratio


KL_LOSSES: Mapping[str, Callable[..., Float[Tensor, " K"]]] = {
    "k2": lambda log_ratio, _ratio: k2(log_ratio),
    "k3": lambda log_ratio, _ratio: k3(log_ratio),  # Shao et al. 2024, eq. 4
    # The gradient includes that of the ratio (DeepSeek-AI 2025, V3.2, section 3.1).
    "k3_is": lambda log_ratio, ratio: ratio * k3(log_ratio),
}
"""KL losses as functions of (log pi - log pi_ref, pi / pi_old), by the setting `kl_estimator`."""


@dataclass(frozen=True)
class TrustRegion:
    """Bounds on the ratio of new to old policy."""

    clip: float
    """Lower bound: 1 - clip."""

    clip_high: float
    """Upper bound: 1 + clip_high."""

    dual_clip: float | None = None
    """Bound on the loss for negative advantages, in units of the advantage."""


def clipped_surrogate(
    ratio: Float[Tensor, " K"],
    logprobs: Float[Tensor, " K"],
    advantages: Float[Tensor, " K"],
    region: TrustRegion,
) -> Float[Tensor, " K"]:
    """Return the negated clipped surrogate objective (Schulman et al. 2017, eq. 7).

    The ratio is clipped to [1 - clip, 1 + clip_high] (separate bounds: Yu et al. 2025, section
    3.1). `dual_clip` c bounds the loss for a negative A by -c * A (Ye et al. 2020, eq. 5).
    """
    del logprobs
    clipped_ratio = ratio.clamp(1 - region.clip, 1 + region.clip_high)
    losses = torch.max(-advantages * ratio, -advantages * clipped_ratio)
    if region.dual_clip is not None:
        bounded = torch.min(losses, -advantages * region.dual_clip)
        losses = torch.where(advantages < 0, bounded, losses)
    return losses


def cispo(
    ratio: Float[Tensor, " K"],
    logprobs: Float[Tensor, " K"],
    advantages: Float[Tensor, " K"],
    region: TrustRegion,
) -> Float[Tensor, " K"]:
    """Return -min(ratio, 1 + clip_high) * A * log pi (MiniMax 2025, eq. 4 and 5).

    The ratio is detached, so every token keeps its gradient; only its weight is bounded.
    """
    return -ratio.detach().clamp(max=1 + region.clip_high) * advantages * logprobs


def reinforce(
    ratio: Float[Tensor, " K"],
    logprobs: Float[Tensor, " K"],
    advantages: Float[Tensor, " K"],
    region: TrustRegion,
) -> Float[Tensor, " K"]:
    """Return -A * log pi, which is unbiased only for on-policy samples (Williams 1992)."""
    del ratio, region
    return -advantages * logprobs


def sequence_ratio(
    logprobs: Float[Tensor, " K"], old_logprobs: Float[Tensor, " K"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, " K"]:
    """Return for each token the geometric mean of its response's ratios (Zheng et al. 2025, eq. 7).

    This is the token-level form of eq. 14: its value is the sequence's ratio, and so is its
    derivative with respect to each token's own log pi. `mask` assigns the K tokens, in order, to
    responses.
    """
    mean = response_means((logprobs - old_logprobs).detach(), mask)
    value = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return value * (logprobs - logprobs.detach()).exp()


def response_means(values: Float[Tensor, " K"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " K"]:
    """Return for each token the mean over its response, summed in float64."""
    padded = torch.zeros(mask.shape, dtype=torch.float64, device=values.device)
    padded = padded.masked_scatter(mask, values.double())
    counts = mask.sum(dim=1)
    means = padded.sum(dim=1) / counts.clamp(min=1)
    # Given output_size, this needs no device synchronization, unlike selecting by the mask.
    return means.repeat_interleave(counts, output_size=len(values)).to(values.dtype)


def has_no_gradient(
    ratio: Float[Tensor, " K"], advantages: Float[Tensor, " K"], region: TrustRegion
) -> Bool[Tensor, " K"]:
    """Return whether each token's ratio is out of bounds, so that clipping zeroes its gradient."""
    clipped = (advantages > 0) & (ratio > 1 + region.clip_high)
    clipped |= (advantages < 0) & (ratio < 1 - region.clip)
    if region.dual_clip is not None:
        clipped |= (advantages < 0) & (ratio > region.dual_clip)
    return clipped


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss, and the ratio of new to old policy from which it is computed."""

    losses: Callable[..., Float[Tensor, " K"]]
    """Loss of each token, as a function of (ratio, logprobs, advantages, region)."""

    is_clipped: Callable[..., Bool[Tensor, " K"]]
    """Tokens that the metric `clip_fraction` counts; a function of (ratio, advantages, region)."""

    ratio: Callable[..., Float[Tensor, " K"]] = lambda new, old, _: policy_ratio(new, old)
    """Probability ratio of each token, as a function of (logprobs, old logprobs, mask)."""


LOSSES: Mapping[str, PolicyLoss] = {
    "clip": PolicyLoss(clipped_surrogate, has_no_gradient),
    "gspo": PolicyLoss(clipped_surrogate, has_no_gradient, sequence_ratio),
    "cispo": PolicyLoss(cispo, lambda ratio, _advantages, region: ratio > 1 + region.clip_high),
    "none": PolicyLoss(reinforce, lambda ratio, *_: torch.zeros_like(ratio, dtype=torch.bool)),
}
"""Policy losses by the setting `loss`."""


Aggregate = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class Weighting:
    """The weight of each token in the loss, from the counts of a minibatch on all processes.

    The loss is sum_t w_t * l_t / N over the N tokens of the minibatch. Weights are known before the
    first micro-batch, so the loss does not depend on how the minibatch is split.
    """

    aggregate: Aggregate
    num_tokens: int
    num_responses: int
    max_new_tokens: int

    def token_weights(self, lengths: Float[Tensor, " K"]) -> Float[Tensor, " K"]:
        """Return weights relative to 1 / `num_tokens`, for tokens of responses of these `lengths`.

        token: every token has the weight 1 (Yu et al. 2025, eq. 8).
        sequence: each of the n tokens of a response weighs 1 / (B n) (Shao et al. 2024, eq. 3).
        constant: every token weighs 1 / (B L) for responses of at most L tokens (Liu et al. 2025).
        """
        if self.aggregate == "token":
            return torch.ones_like(lengths)
        if self.aggregate == "sequence":
            return self.num_tokens / (self.num_responses * lengths)
        constant = self.num_tokens / (self.num_responses * self.max_new_tokens)
        return torch.full_like(lengths, constant)


def correction_weights(
    old_logprobs: Float[Tensor, "B T"],
    sampled_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    correction: Literal["truncate", "mask"],
    level: Literal["token", "sequence"],
    cap: float,
) -> Float[Tensor, "B T"]:
    """Return the importance weight of each token, or 1 on padding.

    truncate: min(pi_old / pi_gen, cap) (truncated importance sampling, Yao et al. 2025). mask: the
    same ratio, but 0 outside [1 / cap, cap] (IcePop, Ling team 2025). At the level `sequence`, the
    ratio is the geometric mean over the response.
    """
    log_ratio = (old_logprobs - sampled_logprobs)[mask]
    if level == "sequence":
        log_ratio = response_means(log_ratio, mask)
    ratio = policy_ratio(log_ratio, torch.zeros_like(log_ratio))
    if correction == "truncate":
        ratio = ratio.clamp(max=cap)
    else:
        ratio = ratio.masked_fill((ratio < 1 / cap) | (ratio > cap), 0.0)
    return torch.ones_like(old_logprobs).masked_scatter(mask, ratio)
