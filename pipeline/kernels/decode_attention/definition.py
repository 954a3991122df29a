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


def check(
    query: Float[Tensor, "B H D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M D"],
    scores: Scores,
    *,
    longest: int,
    out: Float[Tensor, "B H D"] | None = None,
) -> None:
    """Raise unless the tensors fit one another.

    Raises:
        ValueError: one sentence, which names the tensor.
    """
    _check_shapes(query, key, value)
    if scores.sliding_window is not None and scores.sliding_window < 1:
        raise ValueError(f"a sliding window has a token at least, not {scores.sliding_window}")
    if longest > key.shape[2]:
        raise ValueError(f"the cache holds {key.shape[2]} tokens of a sequence, not {longest}")
    if out is not None:
        shape, found = (*query.shape[:2], value.shape[3]), (out.dtype, out.device)
        if out.shape != shape or found != (query.dtype, query.device) or not out.is_contiguous():
            raise ValueError(
                f"out must be {query.dtype} on {query.device} of shape {shape}, side by side, and"
                f" is {out.dtype} on {out.device} of shape {tuple(out.shape)} and stride"
                f" {out.stride()}"
            )
    lengths, count = scores.lengths, query.shape[0]
    for name, tensor in (("key", key), ("value", value), ("lengths", lengths)):
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, the query on {query.device}")
    if (lengths.dtype, lengths.shape) != (torch.int32, (count,)) or not lengths.is_contiguous():
        raise ValueError(
            f"lengths must be torch.int32, {count} of them side by side, and is {lengths.dtype} of"
            f" shape {tuple(lengths.shape)} and stride {lengths.stride()}"
        )


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor, ndim in (("query", query, 3), ("key", key, 4), ("value", value, 4)):
        if tensor.ndim != ndim or not tensor.is_floating_point():
            raise ValueError(
                f"{name} must be numbers in {ndim} dimensions, and is {tensor.dtype} of shape"
                f" {tuple(tensor.shape)}"
            )
    if key.shape[:3] != value.shape[:3] or key.shape[0] != query.shape[0]:
        raise ValueError(
            f"keys and values must be of the same {query.shape[0]} sequences as the query, and have"
            f" shapes {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if key.shape[3] != query.shape[2]:
        raise ValueError(f"keys have {key.shape[3]} numbers a head, the query {query.shape[2]}")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads can't share {key.shape[1]} heads of keys")


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
