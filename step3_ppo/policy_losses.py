"""Policy losses: what one token adds to the loss, by its ratio and its advantage, and its weight.

Pure functions of tensors. Dimension names: K response tokens without padding; B responses, T tokens
of the longest. A new loss is a function, an entry in `LOSSES`, and a name in `step3_ppo.settings`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from step3_ppo.losses import MAX_LOG_RATIO, policy_ratio


@dataclass(frozen=True)
class TrustRegion:
    """How far the ratio of new to old policy may go."""

    clip: float
    """Lower side: 1 - clip."""

    clip_high: float
    """Upper side: 1 + clip_high."""

    dual_clip: float | None = None
    """Bound on the loss of negative advantages, in units of the advantage."""


def clipped(
    ratio: Float[Tensor, " K"],
    logprobs: Float[Tensor, " K"],
    advantages: Float[Tensor, " K"],
    region: TrustRegion,
) -> Float[Tensor, " K"]:
    """Clipped surrogate objective (Schulman et al. 2017, eq. 7), negated.

    The ratio is clipped to [1 - clip, 1 + clip_high] (two sides: Yu et al. 2025, section 3.1).
    `dual_clip` c bounds the loss of a negative advantage by -c * A (Ye et al. 2020, eq. 5).
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
    """-min(ratio, 1 + clip_high) * A * log pi, the ratio a constant (MiniMax 2025, eq. 4 and 5).

    Every token keeps its gradient; only its weight is bounded.
    """
    return -ratio.detach().clamp(max=1 + region.clip_high) * advantages * logprobs


def reinforce(
    ratio: Float[Tensor, " K"],
    logprobs: Float[Tensor, " K"],
    advantages: Float[Tensor, " K"],
    region: TrustRegion,
) -> Float[Tensor, " K"]:
    """-A * log pi (Williams 1992): unbiased for on-policy samples; no ratio, no clipping."""
    del ratio, region
    return -advantages * logprobs


def token_ratio(
    logprobs: Float[Tensor, " K"], old_logprobs: Float[Tensor, " K"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, " K"]:
    """pi(token) / pi_old(token)."""
    del mask
    return policy_ratio(logprobs, old_logprobs)


def sequence_ratio(
    logprobs: Float[Tensor, " K"], old_logprobs: Float[Tensor, " K"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, " K"]:
    """The geometric mean of a response's ratios at each of its tokens (Zheng et al. 2025, eq. 7).

    In the token-level form of eq. 14: its value is the sequence's ratio, and so is its derivative
    with respect to each token's own log pi. `mask` assigns the K tokens, in order, to responses.
    """
    mean = response_means((logprobs - old_logprobs).detach(), mask)
    value = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return value * (logprobs - logprobs.detach()).exp()


def response_means(values: Float[Tensor, " K"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, " K"]:
    """For each token the mean over its response, summed in float64."""
    padded = torch.zeros(mask.shape, dtype=torch.float64, device=values.device)
    padded = padded.masked_scatter(mask, values.double())
    counts = mask.sum(dim=1)
    means = padded.sum(dim=1) / counts.clamp(min=1)
    # The host knows the output's size; selecting by the mask would wait for the device.
    return means.repeat_interleave(counts, output_size=len(values)).to(values.dtype)


def without_gradient(
    ratio: Float[Tensor, " K"], advantages: Float[Tensor, " K"], region: TrustRegion
) -> Bool[Tensor, " K"]:
    """Tokens without a gradient in `clipped`: the ratio is past the bound on their side."""
    beyond = (advantages > 0) & (ratio > 1 + region.clip_high)
    beyond |= (advantages < 0) & (ratio < 1 - region.clip)
    if region.dual_clip is not None:
        beyond |= (advantages < 0) & (ratio > region.dual_clip)
    return beyond


def with_bounded_weight(
    ratio: Float[Tensor, " K"], advantages: Float[Tensor, " K"], region: TrustRegion
) -> Bool[Tensor, " K"]:
    """Tokens whose weight `cispo` bounds, whatever their advantage."""
    del advantages
    return ratio > 1 + region.clip_high


def unbounded(
    ratio: Float[Tensor, " K"], advantages: Float[Tensor, " K"], region: TrustRegion
) -> Bool[Tensor, " K"]:
    """No token is clipped: the loss has no bounds."""
    del advantages, region
    return torch.zeros_like(ratio, dtype=torch.bool)


@dataclass(frozen=True)
class PolicyLoss:
    """A ratio of new to old policy, and what it costs."""

    losses: Callable[..., Float[Tensor, " K"]]
    """The loss of each token, of (ratio, logprobs, advantages, region)."""

    is_clipped: Callable[..., Bool[Tensor, " K"]]
    """The tokens that the metric `clip_fraction` counts; of (ratio, advantages, region)."""

    ratio: Callable[..., Float[Tensor, " K"]] = token_ratio
    """The probability ratio of each token, of (logprobs, old logprobs, mask)."""


LOSSES: Mapping[str, PolicyLoss] = {
    "clip": PolicyLoss(clipped, without_gradient),
    "gspo": PolicyLoss(clipped, without_gradient, sequence_ratio),
    "cispo": PolicyLoss(cispo, with_bounded_weight),
    "none": PolicyLoss(reinforce, unbounded),
}
"""By the setting `loss`."""


Aggregate = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class Weighting:
    """The weight of each token in the loss, by the counts of a whole minibatch on all processes.

    The loss is sum_t w_t * l_t / N over the N tokens of the minibatch. Weights are known before the
    first micro-batch, so that the loss does not depend on how it is cut into micro-batches.
    """

    aggregate: Aggregate
    num_tokens: int
    num_responses: int
    max_new_tokens: int
    num_positive: int = 1
    """Tokens of responses with a reward above 0."""

    def of(self, lengths: Float[Tensor, " K"]) -> Float[Tensor, " K"]:
        """Weights relative to 1 / `num_tokens`, for tokens of responses of these `lengths`.

        token: every token weighs the same (Yu et al. 2025, eq. 8), bit for bit as without weights.
        sequence: every response weighs the same, 1 / (B n_i) (Shao et al. 2024, eq. 3).
        constant: every token weighs 1 / (B L), of responses of at most L tokens (Liu et al. 2025).
        """
        if self.aggregate == "token":
            return torch.ones_like(lengths)
        if self.aggregate == "sequence":
            return self.num_tokens / (self.num_responses * lengths)
        constant = self.num_tokens / (self.num_responses * self.max_new_tokens)
        return torch.full_like(lengths, constant)
