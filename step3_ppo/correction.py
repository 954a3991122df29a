"""Importance weights for responses that were sampled from another policy than training computes.

Generation in fewer bits, adapters merged into bf16 and weights of an older update all sample from a
policy pi_gen near pi_old, which training computes before any update. A token's weight is then
pi_old / pi_gen, bounded. Where the two are bit-identical the weights are exactly 1.

Dimension names: B responses, T response tokens (padded), K without padding.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from step3_ppo.losses import policy_ratio
from step3_ppo.policy_losses import response_means

Correction = Literal["truncate", "mask"]
Level = Literal["token", "sequence"]


def correction_weights(
    old_logprobs: Float[Tensor, "B T"],
    sampled_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    correction: Correction,
    level: Level,
    cap: float,
) -> Float[Tensor, "B T"]:
    """The weight of each token; 1 on padding.

    truncate: min(pi_old / pi_gen, cap) (truncated importance sampling, Yao et al. 2025).
    mask: the same ratio, and 0 where it lies outside [1 / cap, cap] (IcePop, Ling team 2025).
    With the level `sequence` the ratio is the geometric mean over the response.
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


def effective_share(total: float, squares: float, count: float) -> float:
    """The effective sample size of weighted tokens, as a share of their number (Kish 1965).

    Args:
        total: sum of the weights.
        squares: sum of their squares.
        count: number of tokens.
    """
    return total**2 / (count * squares) if squares > 0 else 0.0
