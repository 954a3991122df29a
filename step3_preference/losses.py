"""Losses of preference optimization, each a sum over pairs or responses.

Pure functions of log-probabilities. Dimension names: B pairs; D good and U bad responses. `h` is a
pair's difference in log-ratio to the reference (without a reference, in log-probability), chosen
minus rejected. The caller chooses sums or means over a response's tokens.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

LOG_HALF = math.log(0.5)


def sigmoid_loss(
    h: Float[Tensor, " B"],
    *,
    beta: float,
    gamma: float = 0.0,
    label_smoothing: float = 0.0,
    robust: bool = False,
) -> Float[Tensor, ""]:
    """Return -log sigmoid(beta h - gamma), adjusted for wrong labels (`label_smoothing`).

    This is DPO (Rafailov et al. 2023, eq. 7) and, depending on the arguments, SimPO (Meng et al.
    2024, eq. 6), CPO (Xu et al. 2024, eq. 3), conservative DPO (Mitchell 2023, eq. 3: the expected
    loss) or robust DPO (Chowdhury et al. 2024, eq. 12: an estimate whose expectation under label
    noise is the loss on the correct labels).
    """
    margin = beta * h - gamma
    if label_smoothing == 0:
        return -F.logsigmoid(margin).sum()
    right, wrong = -F.logsigmoid(margin), -F.logsigmoid(-margin)
    if robust:
        scale = 1 - 2 * label_smoothing
        return (((1 - label_smoothing) * right - label_smoothing * wrong) / scale).sum()
    return ((1 - label_smoothing) * right + label_smoothing * wrong).sum()


def ipo_loss(h: Float[Tensor, " B"], *, beta: float) -> Float[Tensor, ""]:
    """Return (h - 1 / (2 beta))^2, which gives the margin a target (Azar et al. 2023, eq. 17)."""
    return (h - 1 / (2 * beta)).square().sum()


def hinge_loss(h: Float[Tensor, " B"], *, beta: float) -> Float[Tensor, ""]:
    """Return max(0, 1 - beta h): SLiC (Zhao et al. 2023) normalized as in RSO (Liu et al. 2024)."""
    return F.relu(1 - beta * h).sum()


def orpo_loss(
    chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], *, beta: float
) -> Float[Tensor, ""]:
    """Return -beta log sigmoid of the log odds ratio (Hong et al. 2024, eq. 7).

    Args:
        chosen: mean log-probability per token of the chosen responses.
        rejected: mean log-probability per token of the rejected responses.
        beta: weight of the odds ratio relative to the negative log-likelihood, lambda in the paper.
    """
    return -beta * F.logsigmoid(log_odds(chosen) - log_odds(rejected)).sum()


def log_odds(logp: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Return log(p / (1 - p)) from log p, in fp32; it and its gradient are finite even at p = 1."""
    # About the spacing of fp32 at 1: keeps log(1 - p) finite where p rounds to 1.
    logp = logp.float().clamp(max=-1e-7)
    return logp - log1mexp(logp)


def log1mexp(x: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Return log(1 - e^x) for x < 0, by the more accurate of two formulas (Maechler 2012)."""
    near = x > LOG_HALF
    # The branch not taken must not contribute a gradient of 0 times infinity.
    large = torch.where(near, x, LOG_HALF)
    small = torch.where(near, LOG_HALF, x)
    return torch.where(near, torch.log(-torch.expm1(large)), torch.log1p(-torch.exp(small)))


def kto_loss(
    good: Float[Tensor, " D"],
    bad: Float[Tensor, " U"],
    *,
    beta: float,
    z0: float,
    weight_good: float = 1.0,
    weight_bad: float = 1.0,
) -> Float[Tensor, ""]:
    """Return the prospect-theoretic loss over single responses (Ethayarajh et al. 2024, eq. 8).

    Args:
        good: log-ratios to the reference for good responses.
        bad: log-ratios to the reference for bad responses.
        beta: saturation rate of the value.
        z0: the reference point, max(0, mean log-ratio of mismatched responses) over the whole
            optimizer step, without a gradient.
        weight_good: lambda_D in the paper.
        weight_bad: lambda_U in the paper.
    """
    gain = weight_good * (1 - torch.sigmoid(beta * (good - z0))).sum()
    return gain + weight_bad * (1 - torch.sigmoid(beta * (z0 - bad))).sum()


def nll_loss(chosen: Float[Tensor, " B"]) -> Float[Tensor, ""]:
    """Return the sum of the chosen responses' negative log-likelihoods (Pang et al. 2024, eq. 1).

    `chosen` contains their mean log-probabilities per token.
    """
    return -chosen.sum()
