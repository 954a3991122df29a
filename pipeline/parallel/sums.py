"""Sums whose bits depend on nothing but the addends and their order."""

from collections.abc import Sequence
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor


def tree_sum(parts: Sequence[Float[Tensor, "*S"]]) -> Float[Tensor, "*S"]:
    """The sum as a binary tree in their order, in fp32 at least, rounded once."""
    dtype = parts[0].dtype
    level = [each.float() for each in parts] if dtype.itemsize < 4 else list(parts)
    while len(level) > 1:
        level = [reduce(torch.add, level[first : first + 2]) for first in range(0, len(level), 2)]
    return level[0].to(dtype)
