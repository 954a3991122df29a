"""Losses of a score that is to be a number of the data."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def squared_error(scores: Float[Tensor, " B"], targets: Float[Tensor, " B"]) -> Float[Tensor, ""]:
    """(s - y)^2 / 2, summed over rows: regression on ratings (HelpSteer2, 2406.08673)."""
    return 0.5 * (scores - targets).square().sum()


def binary_cross_entropy(
    scores: Float[Tensor, " B"], targets: Float[Tensor, " B"]
) -> Float[Tensor, ""]:
    """-y log sigmoid(s) - (1 - y) log sigmoid(-s), summed over rows; targets y in [0, 1].

    At y = 1 it is the Bradley-Terry loss against a score of 0.
    """
    return -(targets * F.logsigmoid(scores) + (1 - targets) * F.logsigmoid(-scores)).sum()
