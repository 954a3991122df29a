"""Attention of one new token of each sequence to what a cache holds of it: the definition.

Dimension names: B sequences, H query heads, G heads of keys and values, M tokens of the cache's
width, D head size.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Which keys the last token of each of B sequences sees, and how each is scored."""

    lengths: Int[Tensor, " B"]
    """Tokens of each sequence, the new one included: one past the last key that it sees.
    int32."""

    scaling: float
    """Factor of the product of query and key."""

    sliding_window: int | None = None
    """Only that many keys are seen, the last ones."""


def decode_attention(
    query: Float[Tensor, "B H D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M D"],
    scores: Scores,
) -> Float[Tensor, "B H D"]:
    """Attention of the last token of each sequence.

        out = sum_t softmax_t(scaling * query . key_t) value_t

    over the keys that `scores` lets it see. A head of keys serves H / G neighbouring query heads.
    Computed in fp32, or in the dtype of `query` if that is wider; 0 where there is no key. What is
    not seen is not read, be it NaN.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    tokens = torch.arange(key.shape[2], device=key.device)
    ends = scores.lengths[:, None]
    seen = tokens < ends  # (B, M)
    if scores.sliding_window is not None:
        seen &= tokens >= ends - scores.sliding_window
    hidden = ~seen[:, None, :, None]
    key, value = (each.to(wide).masked_fill(hidden, 0.0) for each in (key, value))
    grouped = query.to(wide).unflatten(1, (key.shape[1], -1))  # (B, G, H / G, D)
    products = scores.scaling * grouped @ key.transpose(2, 3)  # (B, G, H / G, M)
    products = products.masked_fill(~seen[:, None, None, :], -math.inf)
    # Where there is no key all weights are NaN.
    weights = products.softmax(-1).nan_to_num(0.0)
    return (weights @ value).flatten(1, 2).to(query.dtype)
