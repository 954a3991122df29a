"""The losses of step 2, by kind of label; each is a sum over rows.

Pure functions of tensors, for pairs, classes and numbers.
Dimension names: B rows, C classes.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def pairwise_loss(
    chosen: Float[Tensor, " B"],
    rejected: Float[Tensor, " B"],
    *,
    margin: Float[Tensor, " B"] | None = None,
    center_coef: float = 0.0,
    focal_gamma: float = 0.0,
) -> Float[Tensor, ""]:
    """Return -log sigmoid(r_chosen - r_rejected - margin), summed over pairs.

    This is the loss of Ouyang et al. 2022, eq. 1, with the margin of Touvron et al. 2023, eq. 2.
    `center_coef` adds center_coef * (r_chosen + r_rejected)^2, which keeps scores near 0
    (Eisenstein et al. 2023, section 3): the pairwise term alone doesn't determine their level.
    `focal_gamma` weights a pair by (1 - p)^gamma, p being the probability of its order, so that
    correctly ordered pairs count less (Lin et al. 2017, eq. 4). The caller divides by the number of
    pairs of the whole optimizer step.
    """
    difference = chosen - rejected
    if margin is not None:
        difference = difference - margin
    nll = -F.logsigmoid(difference)
    if focal_gamma:
        # Exponents below 1 have an infinite slope at 0, where p rounds to 1.
        p_wrong = torch.sigmoid(-difference).clamp(min=torch.finfo(difference.dtype).tiny)
        nll = p_wrong**focal_gamma * nll
    return (nll + center_coef * (chosen + rejected).square()).sum()


def cross_entropy(
    logits: Float[Tensor, "B C"],
    classes: Int[Tensor, " B"],
    *,
    weights: Float[Tensor, " C"] | None = None,
    focal_gamma: float = 0.0,
) -> Float[Tensor, ""]:
    """Return alpha_y (1 - p_y)^gamma (-log p_y), summed over rows.

    This is the focal loss (Lin et al. 2017, 1708.02002, eq. 5) over the softmax; alpha are the
    class `weights`, by default 1. With gamma 0 it is the weighted cross entropy. The caller divides
    by the number of rows of the whole optimizer step.
    """
    logprobs = F.log_softmax(logits, dim=-1).gather(1, classes[:, None]).squeeze(1)
    nll = -logprobs
    if focal_gamma:
        # Exponents below 1 have an infinite slope at 0, where p_y rounds to 1.
        p_wrong = (-torch.expm1(logprobs)).clamp(min=torch.finfo(logprobs.dtype).tiny)
        nll = p_wrong**focal_gamma * nll
    if weights is not None:
        nll = weights[classes] * nll
    return nll.sum()


def squared_error(scores: Float[Tensor, " B"], targets: Float[Tensor, " B"]) -> Float[Tensor, ""]:
    """Return (s - y)^2 / 2, summed over rows: regression on ratings (HelpSteer2, 2406.08673)."""
    return 0.5 * (scores - targets).square().sum()


def binary_cross_entropy(
    scores: Float[Tensor, " B"], targets: Float[Tensor, " B"]
) -> Float[Tensor, ""]:
    """Return -y log sigmoid(s) - (1 - y) log sigmoid(-s), summed over rows.

    The targets y are in [0, 1]. At y = 1 it is the Bradley-Terry loss against a score of 0.
    """
    return -(targets * F.logsigmoid(scores) + (1 - targets) * F.logsigmoid(-scores)).sum()
