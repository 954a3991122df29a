"""What causal attention of whole sequences computes, in plain PyTorch.

Dimension names: B sequences, H heads, T tokens, M keys, D and E head sizes.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def causal_attention(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B H M D"],
    value: Float[Tensor, "B H M E"],
    *,
    scaling: float,
) -> Float[Tensor, "B H T E"]:
    """softmax(scaling * query @ key.T) @ value, each token seeing itself and those before it."""
    scores = scaling * query @ key.mT
    later = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(dim=-1) @ value
