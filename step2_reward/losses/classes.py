"""Losses of a classifier: cross entropy, its focal form, and weights of classes.

Dimension names: B rows, C classes.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def cross_entropy(
    logits: Float[Tensor, "B C"],
    classes: Int[Tensor, " B"],
    *,
    weights: Float[Tensor, " C"] | None = None,
    focal_gamma: float = 0.0,
) -> Float[Tensor, ""]:
    """alpha_y (1 - p_y)^gamma (-log p_y), summed over rows.

    Lin et al. 2017 (1708.02002), eq. 5, over the softmax; alpha are `weights` of the classes, 1
    without them. At gamma 0 it is the weighted cross entropy. The caller divides by the number of
    rows of the whole optimizer step.
    """
    logprobs = F.log_softmax(logits, dim=-1).gather(1, classes[:, None]).squeeze(1)
    nll = -logprobs
    if focal_gamma:
        # A power below 1 has an infinite slope at 0, where p_y is 1 after rounding.
        others = (-torch.expm1(logprobs)).clamp(min=torch.finfo(logprobs.dtype).tiny)
        nll = others**focal_gamma * nll
    if weights is not None:
        nll = weights[classes] * nll
    return nll.sum()


def balanced_weights(counts: Sequence[int], *, beta: float) -> list[float]:
    """(1 - beta) / (1 - beta^n) for each class of n rows, scaled to a mean of 1.

    Cui et al. 2019 (1901.05555), eq. 10: the inverse of the effective number of a class's rows.
    beta 0 weighs all classes alike, beta -> 1 by the inverse of their counts. A class without rows
    gets the weight of a class of one.
    """
    weights = [(1 - beta) / (1 - beta ** max(1, count)) for count in counts]
    mean = sum(weights) / len(weights)
    return [weight / mean for weight in weights]
