"""The CUDA kernel that samples each sequence's next token, sampling.cu.

The operator in PyTorch is in `inference.engine.sampling`. Dimensions: B sequences, V vocabulary.
"""

import ctypes
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pipeline.kernels import choice
from pipeline.kernels.gpu import DTYPES, Gpu

UINT64_RANGE = 2**64

MIN_TEMPERATURE = 1e-30
"""Minimum positive temperature; lower ones count as this one, since the logits would overflow."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Settings of a draw; tokens are filtered in the order of the fields."""

    seed: int

    temperature: float
    """Divides the logits; 0 is greedy, with the first token in case of ties."""

    top_k: int | None = None
    """Keep this many of the most likely tokens, and ties with the last one; None keeps all."""

    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with this fraction of the remaining probability
    (Holtzman et al. 2020); among equally likely tokens, lower ids take precedence."""

    min_p: float = 0.0
    """Minimum probability of a kept token, relative to the most likely token."""


def find_kernel(logits: Float[Tensor, "B V"], reason: str | None = None) -> Gpu | None:
    """Return the GPU with the kernel for these logits, or None if PyTorch is used.

    `reason` is an additional reason why the kernel can't be used, as a clause.

    Raises:
        KernelError: kernels are required, and there is none for these logits.
    """
    if not choice.use_gpu(logits.device):
        return None
    reason = reason or unsupported_reason(logits)
    macros = cuda_macros(logits.dtype)
    return choice.resolve(
        "sampling", reason or choice.load_kernel(logits.device, "sampling", macros)
    )


# The CUDA kernel

THREADS = 512
SEGMENT = 128
"""Number of tokens per segment; weights are first summed by segment, as in sampling.cu."""

SHARED_BYTES = 2200
"""Bytes of the struct `Shared` of sampling.cu."""

SEGMENT_BYTES = 12
"""Bytes of shared memory for a segment: a weight and a count."""

MAX_VOCABULARY = SEGMENT * ((48 * 1024 - SHARED_BYTES) // SEGMENT_BYTES)
"""The largest vocabulary that fits into shared memory: about 500,000."""


class Params(ctypes.Structure):
    """`SampleParams` of sampling.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "keys", "positions")),
        *((name, ctypes.c_void_p) for name in ("tokens", "logprobs")),
        ("row_stride", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_double) for name in ("top_p", "min_p")),
        ("temperature", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("vocabulary_size", "top_k")),
    )


def unsupported_reason(logits: Float[Tensor, "B V"]) -> str | None:
    """Return the reason why the kernel doesn't support these logits, or None if it does."""
    if logits.dtype not in DTYPES:
        return f"it doesn't support logits of {logits.dtype}"
    if logits.shape[1] > MAX_VOCABULARY:
        return f"it doesn't support a vocabulary of {logits.shape[1]:,} tokens"
    if logits.stride(1) != 1 or logits.data_ptr() % logits.itemsize:
        return "the logits are not contiguous or not aligned"
    return None


def launch(
    logits: Float[Tensor, "B V"],
    keys: Int[Tensor, " B"],
    positions: Int[Tensor, " B"],
    draw: Draw,
    *,
    gpu: Gpu,
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Sample tokens on a GPU, for supported logits; return them and their log-probabilities.

    The host doesn't read keys or positions, so a CUDA graph of the call can be replayed with
    different ones. The uniform numbers are bit-identical to the reference's. Scores are in fp32;
    their distances to the highest score are truncated to 2^-27 nats, and weights to 2^-44 of the
    highest: a token differs only if its uniform number is that close to a boundary.
    """
    batch, vocabulary_size = logits.shape
    tokens, logprobs = (
        torch.empty(batch, dtype=dtype, device=logits.device)
        for dtype in (torch.int64, torch.float32)
    )
    params = Params(
        logits=logits.data_ptr(),
        keys=keys.data_ptr(),
        positions=positions.data_ptr(),
        tokens=tokens.data_ptr(),
        logprobs=logprobs.data_ptr(),
        row_stride=logits.stride(0),
        seed=draw.seed % UINT64_RANGE,
        top_p=draw.top_p,
        min_p=draw.min_p,
        temperature=draw.temperature and max(draw.temperature, MIN_TEMPERATURE),
        vocabulary_size=vocabulary_size,
        top_k=0 if draw.top_k is None else min(draw.top_k, vocabulary_size),
    )
    gpu.kernel("sampling", "sampling", cuda_macros(logits.dtype))(
        params,
        grid=(batch, 1, 1),
        block=(THREADS, 1, 1),
        shared_bytes=SHARED_BYTES + SEGMENT_BYTES * -(-vocabulary_size // SEGMENT),
    )
    return tokens, logprobs


def cuda_macros(dtype: torch.dtype) -> dict[str, str | int]:
    """Return the preprocessor macros of the kernel."""
    return {
        "NUMBER": DTYPES.get(dtype, ""),
        "PARAMS_BYTES": ctypes.sizeof(Params),
        "SHARED_BYTES": SHARED_BYTES,
    }
