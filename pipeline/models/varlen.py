"""Attention of sequences of any lengths in one call, without padding: torch's own, on a GPU.

`torch.nn.attention.varlen` is FlashAttention over a row of sequences (Dao 2023). Where the kernel
can't run on this GPU, padded calls do the work.

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
    """Whether a small call runs, forward and backward."""
    if _varlen_attn() is None:
        return False
    lengths = (5, 33)
    try:
        # The first caller may compute without gradients; a later one may need them.
        with torch.inference_mode(mode=False), torch.enable_grad():
            heads = [
                torch.ones(1, count, sum(lengths), size, device=device, dtype=dtype)
                for count in (2 * shared_by, 2, 2)
            ]
            out = attend(
                *(each.requires_grad_() for each in heads),
                bounds=bounds_of(lengths).to(device),
                longest=max(lengths),
                scaling=None,
                sliding_window=None,
            )
            out.sum().backward()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        logger.info("attention pads its sequences: varlen_attn doesn't run here: %s", reason)
        return False
    return True
