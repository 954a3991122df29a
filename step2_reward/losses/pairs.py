"""Losses on the scores of pairs: Bradley-Terry, its focal form, and pairs that may be ties."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


def pairwise_loss(
    chosen: Float[Tensor, " B"],
    rejected: Float[Tensor, " B"],
    *,
    margin: Float[Tensor, " B"] | None = None,
    center_coef: float = 0.0,
    focal_gamma: float = 0.0,
) -> Float[Tensor, ""]:
    """-log sigmoid(r_chosen - r_rejected - margin), summed over pairs.

    Ouyang et al. 2022, eq. 1; the margin as in Touvron et al. 2023, eq. 2. `center_coef` adds
    center_coef * (r_chosen + r_rejected)^2, which holds scores near 0 (Eisenstein et al. 2023,
    section 3): the pairwise term alone leaves their level free. `focal_gamma` weighs a pair by
    (1 - p)^gamma, p the probability of its order, so that pairs already in order count less (Lin
    et al. 2017, eq. 4). The caller divides by the number of pairs of the whole optimizer step.
    """
    difference = chosen - rejected
    if margin is not None:
        difference = difference - margin
    nll = -F.logsigmoid(difference)
    if focal_gamma:
        # A power below 1 has an infinite slope at 0, where p is 1 after rounding.
        wrong = torch.sigmoid(-difference).clamp(min=torch.finfo(difference.dtype).tiny)
        nll = wrong**focal_gamma * nll
    return (nll + center_coef * (chosen + rejected).square()).sum()


def tie_log_probabilities(
    difference: Float[Tensor, " B"], kappa: Float[Tensor, ""]
) -> Float[Tensor, "B 3"]:
    """Log-probabilities of a win, a tie and a loss of the first response.

    Its score is higher by `difference`.

    Rao and Kupper 1967, with threshold kappa >= 0 in units of score: P(win) = sigmoid(d - kappa),
    P(loss) = sigmoid(-d - kappa), P(tie) = (e^(2 kappa) - 1) P(win) P(loss); for rewards, Liu et
    al. 2024 (2410.05328). At kappa 0 it is Bradley-Terry.
    """
    win, loss = F.logsigmoid(difference - kappa), F.logsigmoid(-difference - kappa)
    return torch.stack([win, torch.log(torch.expm1(2 * kappa)) + win + loss, loss], dim=1)


def tie_loss(
    chosen: Float[Tensor, " B"],
    rejected: Float[Tensor, " B"],
    is_tie: Bool[Tensor, " B"],
    kappa: Float[Tensor, ""],
) -> Float[Tensor, ""]:
    """-log P of what was observed, a win of `chosen` or a tie, summed over pairs.

    P as `tie_log_probabilities` has it.
    """
    difference = chosen - rejected
    wins = -F.logsigmoid(difference - kappa)
    if not is_tie.any():  # at kappa 0 a tie has probability 0
        return wins.sum()
    ties = -tie_log_probabilities(difference, kappa)[:, 1]
    return torch.where(is_tie, ties, wins).sum()
