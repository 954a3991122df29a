"""Attention of sequences of any lengths in one call, without padding: torch's own, on a GPU.

`torch.nn.attention.varlen` is FlashAttention over a row of sequences (Dao 2023). It shares key
heads among query heads by itself. Where torch hasn't got it, or it computes something else than the
padded calls on this GPU, these do the work.

Dimension names: N tokens of all sequences, H query heads, G key heads, D head size.
"""

import functools
import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

logger = logging.getLogger(__name__)

FORMATS = (torch.bfloat16, torch.float16)

LARGEST = 256
"""Largest head size that the kernel takes."""

NEAR = 0.05
"""How far the two may be apart, on numbers of size 1 in bf16."""


def takes(query: Tensor, key: Tensor, value: Tensor, *, dropout: float) -> bool:
    """Whether these heads, and gradients to them, are this file's to compute."""
    size = query.shape[-1]
    fits = size <= LARGEST and size % 8 == 0 and value.shape[-1] == size
    if not (query.is_cuda and query.dtype in FORMATS and fits) or dropout:
        return False
    return _works(query.device, query.dtype, size, query.shape[1] // key.shape[1])


def attend(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 G N D"],
    value: Float[Tensor, "1 G N D"],
    *,
    bounds: Tensor,
    longest: int,
    scaling: float | None,
    sliding_window: int | None,
) -> Float[Tensor, "1 N H D"]:
    """Causal attention of each sequence to itself.

    Args:
        query: heads of a row of sequences.
        key: theirs, each shared by as many query heads as there are more of.
        value: likewise.
        bounds: int32, where each sequence begins, and where the last one ends.
        longest: of the sequences.
        scaling: of the scores; None is the head size to the power of -1/2.
        sliding_window: tokens that a token sees, itself included; None is all before it.
    """
    query, key, value = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
    function, options = _varlen_attn()
    more: dict[str, object] = {}
    if "num_splits" in options:
        more["num_splits"] = 1  # the same bits whatever shares the call
    if "enable_gqa" in options:
        more["enable_gqa"] = query.shape[1] != key.shape[1]
    else:
        shared_by = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(shared_by, dim=1) for each in (key, value))
    attended = function(
        *(query, key, value, bounds, bounds, longest, longest),
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        **more,
    )
    return attended.unsqueeze(0)


def bounds_of(lengths: Sequence[int]) -> Tensor:
    """Where sequences begin in a row, and where the last one ends, as `attend` takes them."""
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


@functools.cache
def _varlen_attn() -> Any:  # noqa: ANN401  # its type differs from one torch to the next
    """The function of torch and the options that it takes, or None where torch has none.

    That of torch 2.11 takes as many key heads as query heads, and never splits keys.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    options = inspect.signature(varlen_attn).parameters.keys()
    return (varlen_attn, options) if {"scale", "window_size"} <= options else None


@functools.cache
def _works(device: torch.device, dtype: torch.dtype, size: int, shared_by: int) -> bool:
    """Try it once in a process, forward and backward, against the plain computation."""
    if _varlen_attn() is None:
        return False
    try:
        # Whoever comes first may compute without gradients; those after may want them.
        with torch.inference_mode(mode=False), torch.enable_grad():
            good = _agrees(device, dtype, size, shared_by)
        why = "it computes something else than SDPA"
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        good, why = False, str(error).partition("\n")[0]
    if not good:
        logger.info("attention pads its sequences: torch's varlen_attn can't be used here: %s", why)
    return good


def _agrees(device: torch.device, dtype: torch.dtype, size: int, shared_by: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 33)
    heads = [
        torch.randn(1, count, sum(lengths), size, generator=generator).to(device, dtype)
        for count in (2 * shared_by, 2, 2)
    ]
    ours, theirs = ([each.clone().requires_grad_() for each in heads] for _ in range(2))
    bounds = bounds_of(lengths).to(device)
    one = attend(*ours, bounds=bounds, longest=max(lengths), scaling=None, sliding_window=None)
    one.float().square().sum().backward()
    other = plain(*theirs, lengths=lengths, scaling=None, sliding_window=None)
    other.float().square().sum().backward()
    pairs = [(one, other), *((a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))]
    return all(
        torch.allclose(a.float(), b.float(), rtol=NEAR, atol=NEAR)
        for a, b in pairs
        if a is not None and b is not None
    )


def plain(
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 G N D"],
    value: Float[Tensor, "1 G N D"],
    *,
    lengths: Sequence[int],
    scaling: float | None,
    sliding_window: int | None,
) -> Float[Tensor, "1 N H D"]:
    """What `attend` is defined as: one sequence after the other."""
    outputs: list[Tensor] = []
    for heads in zip(*(each.split(list(lengths), dim=2) for each in (query, key, value)),
                     strict=True):  # fmt: skip
        places = torch.arange(heads[0].shape[2], device=query.device)
        distance = places[:, None] - places[None, :]
        seen = (distance >= 0) & (distance < (sliding_window or len(places)))
        outputs.append(
            F.scaled_dot_product_attention(
                *heads, attn_mask=seen, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2)
