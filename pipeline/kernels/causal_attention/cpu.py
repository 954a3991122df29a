"""The calls of `cpu_forward.cpp` and `cpu_backward.cpp`, and which tensors they take."""

import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from pipeline.kernels.decode_attention.cpu import MOST_SIZE
from pipeline.kernels.toolchain.cpp import FUSED, NUMBERS, Built, NotBuiltError, found
from pipeline.kernels.toolchain.levels import bf16_flags
from pipeline.kernels.toolchain.threads import parallel

HERE = Path(__file__).parent
TOKENS = 32
"""Tokens of a tile of the forward pass, as in the source."""


class Heads(ctypes.Structure):
    """A tensor (B, H, T, D) whose last dimension lies side by side; the source has the same."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("sequence", "head", "token")),
    ]


class Forward(ctypes.Structure):
    """One call; the source has the same structure."""

    _fields_ = [
        *((name, Heads) for name in ("query", "key", "value", "out")),
        ("logsumexp", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "tokens", "first", "size")),
        ("room", ctypes.c_void_p),
        ("rooms", ctypes.c_int64),
        ("piece", ctypes.c_int32),
        ("scaling", ctypes.c_float),
    ]


class Backward(ctypes.Structure):
    """One call; the source has the same structure."""

    _fields_ = [
        *((name, Heads) for name in ("query", "key", "value", "out", "grad")),
        *((name, Heads) for name in ("grad_query", "grad_key", "grad_value")),
        ("logsumexp", ctypes.c_void_p),
        *((f"logsumexp_{name}", ctypes.c_int64) for name in ("sequence", "head", "token")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "tokens", "size")),
        ("room", ctypes.c_void_p),
        ("rooms", ctypes.c_int64),
        ("scaling", ctypes.c_float),
    ]


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


@functools.cache
def forward_library() -> Built | NotBuiltError:
    """The kernel, or why it can't be had; found out once in a process."""
    return _library("cpu_forward.cpp")


@functools.cache
def backward_library() -> Built | NotBuiltError:
    """The library of the backward pass."""
    return _library("cpu_backward.cpp")


def _library(source: str) -> Built | NotBuiltError:
    return found(HERE / source, {"NUMBER": NUMBERS[torch.bfloat16]}, FUSED, optional=bf16_flags())


def attention(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B H M D"],
    value: Float[Tensor, "B H M D"],
    *,
    scaling: float,
    piece: int,
    built: Built,
) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]:
    """Causal attention, token after token, and the logarithm of each sum; nothing is checked here.

    Args:
        query: bf16; of the last T of M tokens.
        key: of all tokens.
        value: of as many numbers a head.
        scaling: of the scores.
        piece: how many products are added up in one go, as `decode_attention` has it.
        built: the kernel.
    """
    batch, heads, count, size = query.shape
    tokens = key.shape[2]
    out = _empty_heads(query)
    logsumexp = query.new_empty(batch, heads, count, dtype=torch.float32)
    rooms = _rooms_for(key, built, items=batch * heads * -(-count // TOKENS))
    # The whole team is called: a smaller one would end the threads that PyTorch keeps awake.
    threads = ctypes.c_int32(torch.get_num_threads())
    call = Forward(
        *(_heads_of(each) for each in (query, key, value, out)),
        logsumexp.data_ptr(),
        batch,
        heads,
        tokens,
        tokens - count,
        size,
        rooms.data_ptr(),
        len(rooms),
        piece,
        scaling,
    )
    built.library.attention(ctypes.byref(call), parallel(), threads)
    return out, logsumexp


def attention_grad(
    grad: Float[Tensor, "B H T D"],
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B H T D"],
    value: Float[Tensor, "B H T D"],
    out: Float[Tensor, "B H T D"],
    logsumexp: Float[Tensor, "B H T"],
    *,
    scaling: float,
    built: Built,
) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T D"], Float[Tensor, "B H T D"]]:
    """Gradients of query, key and value, each token after token; nothing is checked here.

    Args:
        grad: of `out`.
        query: bf16, as all but `logsumexp`.
        key: of as many tokens.
        value: of as many numbers a head.
        out: what attention gave.
        logsumexp: the logarithms of its sums, fp32.
        scaling: of the scores.
        built: the kernel.
    """
    batch, heads, tokens, size = query.shape
    grad = grad if grad.stride(3) == 1 else grad.contiguous()
    grads = [_empty_heads(query) for _ in range(3)]
    rooms = _rooms_for(query, built, items=batch * heads)
    threads = ctypes.c_int32(torch.get_num_threads())  # the whole team, as above
    call = Backward(
        *(_heads_of(each) for each in (query, key, value, out, grad, *grads)),
        logsumexp.data_ptr(),
        *logsumexp.stride(),
        batch,
        heads,
        tokens,
        size,
        rooms.data_ptr(),
        len(rooms),
        scaling,
    )
    built.library.attention_grad(ctypes.byref(call), parallel(), threads)
    return grads[0], grads[1], grads[2]


def _heads_of(tensor: Float[Tensor, "B H T D"]) -> Heads:
    """Where a tensor's numbers lie."""
    return Heads(tensor.data_ptr(), *tensor.stride()[:3])


def _empty_heads(like: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T D"]:
    """Memory for a result, token after token, as models go on with it."""
    heads, tokens, size = like.shape[1:]
    stride = (tokens * heads * size, size, heads * size, 1)
    return like.new_empty_strided(like.shape, stride)


def _rooms_for(
    key: Float[Tensor, "B H T D"], built: Built, *, items: int
) -> UInt8[Tensor, "rooms bytes"]:
    """Scratch memory for the kernel's threads, a room for each that may get an item of work."""
    built.library.room_bytes.restype = ctypes.c_int64
    num_bytes = built.library.room_bytes(*map(ctypes.c_int64, key.shape[2:]))
    return key.new_empty(min(torch.get_num_threads(), items), num_bytes, dtype=torch.uint8)
