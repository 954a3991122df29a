"""The call of `attention.cpp`: causal attention of whole sequences."""

import ctypes
import functools

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.kernels.cpu.build import Built, NotBuiltError, bf16_flags, build
from pipeline.kernels.cpu.heads import Heads, empty_heads, heads_of
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
    # The whole team is called: a smaller one would end the threads that PyTorch keeps awake.
    threads = torch.get_num_threads()
    rooms = min(threads, batch * heads * -(-tokens // TOKENS))
    room_bytes = built.library.forward_bytes(ctypes.c_int64(tokens), ctypes.c_int64(size))
    room = query.new_empty(rooms * room_bytes, dtype=torch.uint8)
    call = Forward(
        *(heads_of(each) for each in (query, key, value, out)),
        logsumexp.data_ptr(),
        batch,
        heads,
        tokens,
        size,
        room.data_ptr(),
        rooms,
        piece,
        scaling,
    )
    built.library.attention(ctypes.byref(call), parallel(), ctypes.c_int32(threads))
    return out, logsumexp


@functools.cache
def library() -> Built | NotBuiltError:
    """The kernel, or why it can't be had; found out once in a process."""
    try:
        built = build(SOURCE, {"NUMBER": FORMATS[torch.bfloat16]}, FLAGS, optional=bf16_flags())
    except NotBuiltError as reason:
        return reason
    built.library.forward_bytes.restype = ctypes.c_int64
    return built
