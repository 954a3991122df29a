"""The call of `attention.cpp`: causal attention of whole sequences."""

import ctypes
import functools

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.kernels.cpu.build import Built, NotBuiltError, bf16_flags, found
from pipeline.kernels.cpu.heads import Heads, empty_heads, heads_of, rooms_for
from pipeline.kernels.cpu.linear import FLAGS, FORMATS, HERE
from pipeline.kernels.cpu.threads import parallel

SOURCE = HERE / "attention.cpp"
TOKENS = 32
"""Of a tile; as in the source."""


class Forward(ctypes.Structure):
    """One call; the source has the same structure."""

    _fields_ = [
        *((name, Heads) for name in ("query", "key", "value", "out")),
        ("logsumexp", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "tokens", "size")),
        ("room", ctypes.c_void_p),
        ("rooms", ctypes.c_int64),
        ("piece", ctypes.c_int32),
        ("scaling", ctypes.c_float),
    ]


def attention(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B H T D"],
    value: Float[Tensor, "B H T D"],
    *,
    scaling: float,
    piece: int,
    built: Built,
) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]:
    """Causal attention, token after token, and the logarithm of each sum; nothing is checked here.

    Args:
        query: bf16.
        key: of as many tokens.
        value: of as many numbers a head.
        scaling: of the scores.
        piece: how many products are added up in one go, as `decode.piece_of` has it.
        built: the kernel.
    """
    batch, heads, tokens, size = query.shape
    out = empty_heads(query)
    logsumexp = query.new_empty(batch, heads, tokens, dtype=torch.float32)
    rooms = rooms_for(query, built, items=batch * heads * -(-tokens // TOKENS))
    # The whole team is called: a smaller one would end the threads that PyTorch keeps awake.
    threads = ctypes.c_int32(torch.get_num_threads())
    call = Forward(
        *(heads_of(each) for each in (query, key, value, out)),
        logsumexp.data_ptr(),
        batch,
        heads,
        tokens,
        size,
        rooms.data_ptr(),
        len(rooms),
        piece,
        scaling,
    )
    built.library.attention(ctypes.byref(call), parallel(), threads)
    return out, logsumexp


@functools.cache
def library() -> Built | NotBuiltError:
    """The kernel, or why it can't be had; found out once in a process."""
    return found(SOURCE, {"NUMBER": FORMATS[torch.bfloat16]}, FLAGS, optional=bf16_flags())
