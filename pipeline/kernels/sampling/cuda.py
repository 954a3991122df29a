"""Drawing tokens on a GPU: checks, the choice of a specialisation, and the launch."""

import ctypes

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pipeline.kernels.gpu import DTYPES, DTYPES_BY_NAME, Gpu, Macros
from pipeline.kernels.sampling import definition
from pipeline.kernels.sampling.definition import WORD, Draw

THREADS = 512
SEGMENT = 128
"""Words whose weights are added up first, as in the source."""

SHARED_BYTES = 2200
"""Bytes of the struct `Shared` of the source."""

SEGMENT_BYTES = 12
"""Bytes of shared memory for a segment: a weight and a count."""

MOST_WORDS = SEGMENT * ((48 * 1024 - SHARED_BYTES) // SEGMENT_BYTES)
"""Words for which shared memory has room: 500,000."""

LOGPROB_ERROR = 1e-4
"""In nats, at scores below 16, in the self-test."""


class Params(ctypes.Structure):
    """`SampleParams` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "keys", "positions")),
        *((name, ctypes.c_void_p) for name in ("tokens", "logprobs")),
        ("row_stride", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_double) for name in ("top_p", "min_p")),
        ("temperature", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("num_words", "top_k")),
    )


def refusal(logits: Float[Tensor, "B V"]) -> str | None:
    """Why the kernel can't take these, if it can't."""
    if logits.dtype not in DTYPES:
        return f"logits of {logits.dtype}"
    if logits.shape[1] > MOST_WORDS:
        return f"a vocabulary of {logits.shape[1]:,} words"
    if logits.stride(1) != 1 or logits.data_ptr() % logits.itemsize:
        return "logits that don't lie side by side"
    return None


def sample(
    logits: Float[Tensor, "B V"],
    keys: Int[Tensor, " B"],
    positions: Int[Tensor, " B"],
    draw: Draw,
    *,
    gpu: Gpu,
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """`definition.sample` on a GPU, for what `refusal` has nothing against.

    Keys and positions are read on the GPU: a CUDA graph of the call may be replayed with others.
    The numbers drawn are the definition's bit for bit. Scores are fp32, distances below the highest
    are cut to 2^-27 nats, and weights to 2^-44 of the highest: a token is another one only where a
    boundary between two lies as near as that to the number drawn.
    """
    batch, num_words = logits.shape
    tokens = torch.empty(batch, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(batch, dtype=torch.float32, device=logits.device)
    params = Params(
        logits=logits.data_ptr(),
        keys=keys.data_ptr(),
        positions=positions.data_ptr(),
        tokens=tokens.data_ptr(),
        logprobs=logprobs.data_ptr(),
        row_stride=logits.stride(0),
        seed=draw.seed % WORD,
        top_p=draw.top_p,
        min_p=draw.min_p,
        temperature=draw.temperature,
        num_words=num_words,
        top_k=0 if draw.top_k is None else min(draw.top_k, num_words),
    )
    gpu.kernel("sampling", "sampling", specialisation(logits.dtype))(
        params,
        grid=(batch, 1, 1),
        block=(THREADS, 1, 1),
        shared_bytes=SHARED_BYTES + SEGMENT_BYTES * -(-num_words // SEGMENT),
    )
    return tokens, logprobs


def specialisation(dtype: torch.dtype) -> dict[str, str | int]:
    """Macros of the kernel."""
    return {
        "NUMBER": DTYPES.get(dtype, ""),
        "PARAMS_BYTES": ctypes.sizeof(Params),
        "SHARED_BYTES": SHARED_BYTES,
    }


def self_test(gpu: Gpu, defines: Macros) -> bool:
    """Tokens of four sequences, the likeliest and by chance."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4, 300, generator=generator)
    logits = logits.to(DTYPES_BY_NAME[str(defines["NUMBER"])])
    numbers = torch.arange(8).view(2, 4)
    there = numbers.to(gpu.device)
    for draw in (
        Draw(seed=1, temperature=0.0),
        Draw(seed=1, temperature=0.9, top_k=50, top_p=0.9, min_p=0.01),
    ):
        tokens, logprobs = sample(logits.to(gpu.device), there[0], there[1], draw, gpu=gpu)
        expected = definition.sample(logits, numbers[0], numbers[1], draw)
        near = torch.allclose(logprobs.cpu(), expected[1], rtol=0, atol=LOGPROB_ERROR)
        if not near or not torch.equal(tokens.cpu(), expected[0]):
            return False
    return True
