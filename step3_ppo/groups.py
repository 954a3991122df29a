"""Statistics of a prompt's group of responses: mean, deviation, and whether all are equal.

Pure functions of tensors. Dimension names: P prompts, G responses to each. `counted` is False where
a response has no reward: it is left out. Sums are taken in sorted order, so that they do not depend
on the order of the responses, not even in the last bit.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def group_mean(grouped: Float[Tensor, "P G"], counted: Bool[Tensor, "P G"]) -> Float[Tensor, "P 1"]:
    """Mean of the counted numbers of each group; 0 where there are none."""
    return _sum(grouped, counted) / counts(counted).clamp(min=1)


def group_std(grouped: Float[Tensor, "P G"], counted: Bool[Tensor, "P G"]) -> Float[Tensor, "P 1"]:
    """Sample standard deviation of the counted numbers of each group; 0 where there is only one."""
    squares = (grouped - group_mean(grouped, counted)).square()
    return (_sum(squares, counted) / (counts(counted) - 1).clamp(min=1)).sqrt()


def are_equal(grouped: Float[Tensor, "P G"], counted: Bool[Tensor, "P G"]) -> Bool[Tensor, "P 1"]:
    """Whether all counted numbers of a group are the same; true of groups of one, and of none.

    Compares the largest with the smallest: after rounding, neither a difference from the mean nor a
    deviation is exactly 0.
    """
    largest = grouped.masked_fill(~counted, -torch.inf).amax(dim=1, keepdim=True)
    return largest <= grouped.masked_fill(~counted, torch.inf).amin(dim=1, keepdim=True)


def counts(counted: Bool[Tensor, "P G"]) -> Float[Tensor, "P 1"]:
    """The number of counted entries of each group."""
    return counted.double().sum(dim=1, keepdim=True)


def _sum(grouped: Float[Tensor, "P G"], counted: Bool[Tensor, "P G"]) -> Float[Tensor, "P 1"]:
    ordered = grouped.masked_fill(~counted, 0.0).sort(dim=1).values
    return ordered.sum(dim=1, keepdim=True)
