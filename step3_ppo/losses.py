"""The mathematics of RL on token sequences: pure functions of tensors, no models, no settings.

Advantages are in `step3_ppo.advantages`, policy losses in `step3_ppo.policy_losses`.

Dimension names: B responses, T response tokens (padded; masks are True on real tokens), K response
tokens without padding. Conventions follow Ziegler et al. 2019 and Ouyang et al. 2022. Losses are
sums; the caller divides by the token count of the whole optimizer step over all processes.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this before exp, which keeps fp32 finite."""


def token_rewards(
    score: Float[Tensor, " B"],
    logprobs: Float[Tensor, "B T"],
    ref_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    kl_coef: float,
) -> Float[Tensor, "B T"]:
    """Reward of each token: -kl_coef * KL everywhere, plus the score on the last token.

    KL is the k1 estimate log pi - log pi_ref (Schulman 2020, "Approximating KL Divergence"). Zero
    on padding. Every response has at least one token.
    """
    rewards = -kl_coef * (logprobs - ref_logprobs) * mask
    last = mask.sum(dim=1, keepdim=True) - 1  # (B, 1) index of the final response token
    return rewards.scatter_add(1, last, score[:, None])


def whiten(
    values: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    mean: float,
    variance: float,
    shift_mean: bool,
) -> Float[Tensor, "B T"]:
    """(x - mean) / sqrt(variance + 1e-8) on real tokens, 0 on padding.

    Without `shift_mean` the mean is added back. Mean and (biased) variance are those of all
    processes.
    """
    whitened = (values - mean) * (variance + 1e-8) ** -0.5
    if not shift_mean:
        whitened = whitened + mean
    return whitened * mask


def policy_ratio(
    logprobs: Float[Tensor, " K"], old_logprobs: Float[Tensor, " K"]
) -> Float[Tensor, " K"]:
    """pi(token) / pi_old(token)."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def value_loss(
    values: Float[Tensor, " K"],
    old_values: Float[Tensor, " K"],
    returns: Float[Tensor, " K"],
    *,
    clip: float | None,
    counted: Float[Tensor, " K"] | None = None,
) -> Float[Tensor, ""]:
    """Half the squared error, the worse of clipped and unclipped, summed over tokens.

    The clipped value stays within `clip` of `old_values`, the critic's estimate at rollout time.
    Tokens for which `counted` is 0 add nothing.
    """
    error = (values - returns).square()
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.max(error, (clipped - returns).square())
    return 0.5 * (error if counted is None else error * counted).sum()


def overlong_penalty(
    lengths: Float[Tensor, " B"], *, limit: int, buffer: float
) -> Float[Tensor, " B"]:
    """The soft penalty on long responses, added to their reward (Yu et al. 2025, eq. 13).

    0 up to `limit` - `buffer` tokens, then falling in proportion to -1 at `limit`.
    """
    return ((limit - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def k2(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """d^2 / 2 for d = log pi - log pi_ref (Schulman 2020).

    Its gradient on tokens drawn from pi is that of KL(pi || pi_ref).
    """
    return 0.5 * log_ratio.square()


def k3(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """exp(-d) - 1 + d for d = log pi - log pi_ref of tokens drawn from pi (Schulman 2020).

    An estimate of the KL divergence that is never negative.
    """
    # Clamped on this side only: where pi_ref makes a token very unlikely, the gradient must stay.
    log_ratio = log_ratio.clamp(min=-MAX_LOG_RATIO)
    return (-log_ratio).exp() - 1 + log_ratio


def explained_variance(*, residual_variance: float, return_variance: float) -> float:
    """1 - Var(returns - values) / Var(returns); 0 where the returns do not vary."""
    return 1 - residual_variance / return_variance if return_variance > 0 else 0.0
