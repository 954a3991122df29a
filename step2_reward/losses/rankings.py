"""The loss of ranked lists of responses.

Dimension names: B lists, K responses of the longest.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def plackett_luce_loss(
    scores: Float[Tensor, "B K"], ranks: Float[Tensor, "B K"]
) -> Float[Tensor, ""]:
    """-sum_i log softmax(s_i over i and what ranks no better), summed over lists.

    Plackett 1975, Luce 1959: the best is drawn first, then the best of the rest. Responses of equal
    rank compete with each other, each against all of them (Breslow 1974). `ranks` are 1 for the
    best; infinite ranks mark places without a response, as lists differ in length. A stage is
    written as -log sigmoid(s_i - logsumexp of the others), so that two responses are Bradley-Terry
    bit for bit.
    """
    real = ranks.isfinite()
    others = ~torch.eye(ranks.shape[1], dtype=torch.bool, device=ranks.device)
    competes = (ranks[:, None, :] >= ranks[:, :, None]) & real[:, None, :] & others
    rivals = torch.where(competes, scores[:, None, :], -math.inf)
    has_rivals = competes.any(dim=2) & real
    rest = torch.logsumexp(torch.where(has_rivals[..., None], rivals, 0.0), dim=2)
    stages = -F.logsigmoid(scores - rest)
    return torch.where(has_rivals, stages, 0.0).sum(dim=1).sum()
