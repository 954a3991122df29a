"""What causal attention of whole sequences computes, in plain PyTorch.

Dimension names: B sequences, H heads, T tokens, M keys, D and E head sizes.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def check(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless the tensors fit one another.

    Raises:
        ValueError: one sentence, which names the tensor.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 4 or not tensor.is_floating_point():
            raise ValueError(
                f"{name} must be numbers in 4 dimensions, and is {tensor.dtype} of shape"
                f" {tuple(tensor.shape)}"
            )
        if (tensor.dtype, tensor.device) != (query.dtype, query.device):
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, the query {query.dtype} on"
                f" {query.device}"
            )
    (*heads_of_query, tokens, size), (*heads_of_key, keys, key_size) = query.shape, key.shape
    if heads_of_query != heads_of_key or size != key_size or keys < tokens:
        raise ValueError(
            f"keys of shape {tuple(key.shape)} are not those of queries of {tuple(query.shape)}"
        )
    if heads_of_query[1] == 0:  # torch 2.11 divides by the number, which ends the process
        raise ValueError(f"queries of shape {tuple(query.shape)} have no heads")
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"values of shape {tuple(value.shape)} are not those of keys of {tuple(key.shape)}"
        )


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
