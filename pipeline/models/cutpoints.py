"""Thresholds of a score that are learned beside the model."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

STEP = 100.0
"""Cutpoints move that many times as far in a step as weights: they are few, in units of the score,
and start at what the labels' shares say."""


class Cutpoints(nn.Module):
    """Increasing thresholds b_1 < b_2 < ... of a score, or one that is above 0.

    The first is free (or, with `positive`, the softplus of what is learned), and each gap the
    softplus of what is learned, so that no step can put them out of order.

    Args:
        initial: where they start, increasing.
        positive: whether the first stays above 0.
    """

    def __init__(
        self, initial: Sequence[float], *, device: torch.device, positive: bool = False
    ) -> None:
        super().__init__()
        self.positive = positive
        start = torch.tensor(initial, dtype=torch.float32, device=device)
        free = start.clone()
        first = 0 if positive else 1
        gaps = torch.diff(start, prepend=start.new_zeros(1))[first:]
        free[first:] = gaps + torch.log(-torch.expm1(-gaps))  # the inverse of softplus
        self.start = nn.Buffer(free, persistent=False)
        self.moved = nn.Parameter(torch.zeros_like(start))

    def forward(self) -> Float[Tensor, " cuts"]:
        """The thresholds as they are now, fp32."""
        free = self.start + STEP * self.moved
        if self.positive:
            return F.softplus(free).cumsum(0)
        return torch.cat([free[:1], F.softplus(free[1:])]).cumsum(0)
