"""Agreement of two orders: rank correlation, concordance, and the area under the ROC curve.

Dimension name: N items.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def average_ranks(values: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """The rank of each value, from 1 upwards; equal values share the mean of their ranks."""
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    return (last - (counts - 1) / 2)[inverse].to(torch.float64)


def spearman(one: Float[Tensor, " N"], other: Float[Tensor, " N"]) -> float:
    """Spearman's rank correlation; 0 where either is constant."""
    first, second = (average_ranks(each) for each in (one, other))
    first, second = first - first.mean(), second - second.mean()
    spread = math.sqrt((first.square().sum() * second.square().sum()).item())
    return (first @ second).item() / spread if spread > 0 else 0.0


def concordance(scores: Float[Tensor, " N"], targets: Float[Tensor, " N"]) -> float:
    """The share of pairs with different targets whose scores are in the same order.

    Equal scores count half; without such a pair it is 1/2.
    """
    right, total = 0.0, 0
    for place in range(len(targets)):  # a row at a time: memory stays linear
        above = targets > targets[place]
        ahead = scores[above]
        right += (ahead > scores[place]).sum().item() + 0.5 * (ahead == scores[place]).sum().item()
        total += int(above.sum())
    return right / total if total else 0.5


def area_under_curve(scores: Float[Tensor, " N"], positive: Bool[Tensor, " N"]) -> float | None:
    """Area under the ROC curve: the chance that a positive scores above a negative, ties half.

    By ranks (Mann and Whitney 1947); None without items of both kinds.
    """
    count = int(positive.sum())
    others = len(positive) - count
    if not count or not others:
        return None
    ranks = average_ranks(scores)[positive].sum().item()
    return (ranks - count * (count + 1) / 2) / (count * others)
