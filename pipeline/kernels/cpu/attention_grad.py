"""The call of `attention_grad.cpp`: the way back through causal attention of whole sequences."""

import ctypes
import functools

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.kernels.cpu.build import Built, NotBuiltError, bf16_flags, found
from pipeline.kernels.cpu.heads import Heads, empty_heads, heads_of, rooms_for
from pipeline.kernels.cpu.linear import FLAGS, FORMATS, HERE
from pipeline.kernels.cpu.threads import parallel

SOURCE = HERE / "attention_grad.cpp"


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


@functools.cache
def library() -> Built | NotBuiltError:
    """The kernel, or why it can't be had; found out once in a process."""
    return found(SOURCE, {"NUMBER": FORMATS[torch.bfloat16]}, FLAGS, optional=bf16_flags())


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
    grads = [empty_heads(query) for _ in range(3)]
    rooms = rooms_for(query, built, items=batch * heads)
    # The whole team is called: a smaller one would end the threads that PyTorch keeps awake.
    threads = ctypes.c_int32(torch.get_num_threads())
    call = Backward(
        *(heads_of(each) for each in (query, key, value, out, grad, *grads)),
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
