"""Heads of whole sequences as `heads.h` has them, and which of them its kernels take."""

import ctypes
from collections.abc import Iterator

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from pipeline.kernels.cpu.build import Built
from pipeline.kernels.cpu.decode import MOST_SIZE


class Heads(ctypes.Structure):
    """A tensor (B, H, T, D) whose last dimension lies side by side; the source has the same."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("sequence", "head", "token")),
    ]


def heads_of(tensor: Float[Tensor, "B H T D"]) -> Heads:
    """Where a tensor's numbers lie."""
    return Heads(tensor.data_ptr(), *tensor.stride()[:3])


def empty_heads(like: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T D"]:
    """Memory for a result, token after token, as models go on with it."""
    heads, tokens, size = like.shape[1:]
    stride = (tokens * heads * size, size, heads * size, 1)
    return like.new_empty_strided(like.shape, stride)


def rooms_for(
    query: Float[Tensor, "B H T D"], built: Built, *, items: int
) -> UInt8[Tensor, "rooms bytes"]:
    """What a kernel's threads work in: a room for each that finds one of so many items of work."""
    built.library.room_bytes.restype = ctypes.c_int64
    num_bytes = built.library.room_bytes(*map(ctypes.c_int64, query.shape[2:]))
    return query.new_empty(min(torch.get_num_threads(), items), num_bytes, dtype=torch.uint8)


def refusals(
    query: Float[Tensor, "B H T D"], key: Float[Tensor, "B H M D"], value: Float[Tensor, "B H M E"]
) -> Iterator[str]:
    """Why the kernels don't take these tensors of bf16, in clauses; nothing where they do."""
    size = query.shape[3]
    if value.shape[3] != size:
        yield f"a head has {size} numbers in keys and {value.shape[3]} in values"
    if key.shape[2] != query.shape[2]:
        yield "there are more keys than tokens"
    if not 0 < size <= MOST_SIZE or size % 2:
        yield f"they are written for heads of an even number up to {MOST_SIZE}, not {size}"
    if any(tensor.data_ptr() % tensor.element_size() for tensor in (query, key, value)):
        yield "a tensor begins between the places of two numbers in memory"
