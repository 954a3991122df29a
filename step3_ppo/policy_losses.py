"""Policy losses: what one token adds to the loss, by its ratio and its advantage.

Pure functions of tensors. Dimension name: K response tokens without padding. A new loss is a
function, an entry in `LOSSES`, and a name in `step3_ppo.config`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from step3_ppo.losses import policy_ratio


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
    logprobs: Float[Tensor, " K"],
    old_logprobs: Float[Tensor, " K"],
    advantages: Float[Tensor, " K"],
    region: TrustRegion,
) -> Float[Tensor, " K"]:
    """Clipped surrogate objective (Schulman et al. 2017, eq. 7), negated.

    The ratio is clipped to [1 - clip, 1 + clip_high] (two sides: Yu et al. 2025, section 3.1).
    `dual_clip` c bounds the loss of a negative advantage by -c * A (Ye et al. 2020, eq. 5).
    """
    ratio = policy_ratio(logprobs, old_logprobs)
    clipped_ratio = ratio.clamp(1 - region.clip, 1 + region.clip_high)
    losses = torch.max(-advantages * ratio, -advantages * clipped_ratio)
    if region.dual_clip is not None:
        bounded = torch.min(losses, -advantages * region.dual_clip)
        losses = torch.where(advantages < 0, bounded, losses)
    return losses


def reinforce(
    logprobs: Float[Tensor, " K"],
    old_logprobs: Float[Tensor, " K"],
    advantages: Float[Tensor, " K"],
    region: TrustRegion,
) -> Float[Tensor, " K"]:
    """-A * log pi (Williams 1992), right for the policy that was sampled; no ratio, no clipping."""
    del old_logprobs, region
    return -advantages * logprobs


LOSSES: Mapping[str, Callable[..., Float[Tensor, " K"]]] = {"clip": clipped, "none": reinforce}
"""By the setting `loss`."""
