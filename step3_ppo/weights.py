"""The weight of each token of a minibatch in the policy loss.

The loss is sum_t w_t * l_t / N over the N tokens of a whole minibatch, on all processes. Weights
are known before the first micro-batch, so that the loss does not depend on how the minibatch is cut
into micro-batches.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Aggregate = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class Weighting:
    """The counts of a whole minibatch, over all processes."""

    aggregate: Aggregate
    num_tokens: int
    num_responses: int
    max_new_tokens: int
    num_positive: int = 1
    """Tokens of responses with a reward above 0."""

    def of(self, lengths: Float[Tensor, " K"]) -> Float[Tensor, " K"]:
        """Weights relative to 1 / `num_tokens`, for tokens of responses of these `lengths`.

        token: every token weighs the same (Yu et al. 2025, eq. 8), bit for bit as without weights.
        sequence: every response weighs the same, 1 / (B n_i) (Shao et al. 2024, eq. 3).
        constant: every token weighs 1 / (B L), of responses of at most L tokens (Liu et al. 2025).
        """
        if self.aggregate == "token":
            return torch.ones_like(lengths)
        if self.aggregate == "sequence":
            return self.num_tokens / (self.num_responses * lengths)
        constant = self.num_tokens / (self.num_responses * self.max_new_tokens)
        return torch.full_like(lengths, constant)
