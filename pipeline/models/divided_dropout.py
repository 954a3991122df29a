"""Dropout of what an adapter reads, where each process has some columns of it.

Processes that compute a layer together draw from generators in the same state. So each draws the
mask of all columns, as one process does, and takes its own: on CPUs it is the mask of one process.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pipeline.parallel.shards import ShardSpec


class DividedDropout(nn.Module):
    """Dropout by this process's columns of the mask of all.

    Args:
        probability: of an element to be dropped.
        columns: of all processes.
        own: which of them this one has.
    """

    def __init__(self, probability: float, columns: int, own: ShardSpec) -> None:
        super().__init__()
        self.p, self._columns, self._own = probability, columns, own

    def forward(self, values: Float[Tensor, "*B n"]) -> Float[Tensor, "*B n"]:
        """Some elements 0, the others larger."""
        if not self.training:
            return values
        shape = (*values.shape[:-1], self._columns)
        mask = torch.empty(shape, dtype=values.dtype, device=values.device)
        mask.bernoulli_(1 - self.p).div_(1 - self.p)
        own = replace(self._own, dim=values.ndim - 1).of(mask)
        return values * own.clone(memory_format=torch.contiguous_format)
