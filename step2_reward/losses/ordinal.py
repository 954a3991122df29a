"""The loss of ordered classes: one score, and cutpoints between the classes.

Dimension names: B rows, K classes.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def ordinal_log_probabilities(
    scores: Float[Tensor, " B"], cutpoints: Float[Tensor, " cuts"]
) -> Float[Tensor, "B classes"]:
    """The log-probability of each class, worst first.

    log P(y) = log[sigmoid(b_y - s) - sigmoid(b_(y-1) - s)].

    Proportional odds (McCullagh 1980), with increasing cutpoints b, b_(-1) = -inf and b_(K-1) =
    inf; one score for all classes as in CORAL (Cao et al. 2019, 1901.07884). The difference is
    computed as sigmoid(a) sigmoid(-b) (1 - e^(b - a)), which loses nothing to cancellation.
    """
    below = cutpoints - scores[:, None]  # (B, K - 1)
    upper, lower = F.logsigmoid(below), F.logsigmoid(-below)
    gaps = torch.log(-torch.expm1(cutpoints[:-1] - cutpoints[1:]))
    inner = upper[:, 1:] + lower[:, :-1] + gaps
    return torch.cat([upper[:, :1], inner, lower[:, -1:]], dim=1)


def ordinal_loss(
    scores: Float[Tensor, " B"], classes: Int[Tensor, " B"], cutpoints: Float[Tensor, " cuts"]
) -> Float[Tensor, ""]:
    """-log P of the class of each row, summed; P as `ordinal_log_probabilities` has it.

    With two classes it is the Bradley-Terry loss of score and cutpoint.
    """
    logprobs = ordinal_log_probabilities(scores, cutpoints)
    return -logprobs.gather(1, classes[:, None]).sum()
