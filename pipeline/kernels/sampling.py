"""Sampling of each sequence's next token, with a kernel if there is one.

`reference_sample` defines the operator in PyTorch; sampling.cu is the CUDA kernel. Dimension names:
B sequences, V vocabulary.
"""

import ctypes
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pipeline.kernels import choice
from pipeline.kernels.gpu import DTYPES, DTYPES_BY_NAME, Gpu, Macros

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
UINT64_RANGE = 2**64


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


def reference_sample(
    logits: Float[Tensor, "B V"], keys: Int[Tensor, " B"], positions: Int[Tensor, " B"], draw: Draw
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Sample token ids; return them and their log-probabilities before any filter, in fp32.

    A row's token is the one at which the cumulative weight of the kept tokens, in the order of
    their ids, exceeds the fraction `uniform_numbers(seed, key, position)` of the total, in float64.
    The log-probability is NaN if a logit is NaN or the highest one is infinite.
    """
    scores = logits.double() / (draw.temperature or 1.0)
    logprobs = scores.log_softmax(dim=-1)
    if draw.temperature == 0:
        ids = torch.arange(scores.shape[-1], device=scores.device)
        is_highest = scores == scores.amax(dim=-1, keepdim=True)
        tokens = torch.where(is_highest, ids, len(ids) - 1).amin(dim=-1)
    else:
        cumulative = filter_weights(logprobs.exp(), draw).cumsum(dim=-1)
        points = uniform_numbers(draw.seed, keys, positions)[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, points, right=True).squeeze(-1)
        tokens = tokens.clamp(max=scores.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1).float()


def filter_weights(weights: Float[Tensor, "B V"], draw: Draw) -> Float[Tensor, "B V"]:
    """Return the weights of the tokens, set to 0 for those that may not be drawn."""
    if draw.top_k is not None:
        threshold = weights.topk(min(draw.top_k, weights.shape[-1]), dim=-1).values[:, -1:]
        weights = weights * (weights >= threshold)
    if draw.top_p < 1:
        ordered, order = weights.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        ordered = ordered * (before < draw.top_p * ordered.sum(dim=-1, keepdim=True))
        weights = torch.zeros_like(weights).scatter(-1, order, ordered)
    return weights * (weights >= draw.min_p * weights.amax(dim=-1, keepdim=True))


def uniform_numbers(
    seed: int, keys: Int[Tensor, " B"], positions: Int[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """Compute a number in [0, 1) per key and position: a pure function of (seed, key, position).

    There is no stream state, so a row's numbers do not depend on other rows. Each takes
    three rounds of SplitMix64 (Steele et al. 2014), whose 64-bit words are stored as int64.
    """
    state = _mix(torch.zeros_like(keys) + _to_int64(seed))
    state = _mix(state ^ keys)
    state = _mix(state ^ positions)
    return _shift_right(state, 11).double() * 2.0**-53


def _mix(state: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Apply one round of SplitMix64, a bijection of 64-bit words."""
    state = state + _to_int64(GOLDEN_GAMMA)
    state = (state ^ _shift_right(state, 30)) * _to_int64(0xBF58476D1CE4E5B9)
    state = (state ^ _shift_right(state, 27)) * _to_int64(0x94D049BB133111EB)
    return state ^ _shift_right(state, 31)


def _shift_right(state: Int[Tensor, " B"], bits: int) -> Int[Tensor, " B"]:
    """Shift right, filling with zeros."""
    return (state >> bits) & (2 ** (64 - bits) - 1)


def _to_int64(word: int) -> int:
    """Convert a 64-bit word to int64."""
    word %= UINT64_RANGE
    return word - UINT64_RANGE if word >= UINT64_RANGE // 2 else word


def find_kernel(logits: Float[Tensor, "B V"], reason: str | None = None) -> Gpu | None:
    """Return the GPU with the kernel for these logits; None if PyTorch is used.

    `reason` is an additional reason why the kernel can't be used, as a clause.

    Raises:
        KernelError: kernels are required, and there is none for these logits.
    """
    if not choice.use_gpu(logits.device):
        return None
    reason = reason or unsupported_reason(logits)
    macros = cuda_macros(logits.dtype)
    return choice.resolve(
        "sampling", reason or choice.load_kernel(logits.device, "sampling", macros, self_test)
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

LOGPROB_ERROR = 1e-4
"""Error in nats that the self-test allows, for scores below 16."""


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
    """Return the reason why the kernel doesn't support these logits; None if it does."""
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
    out: tuple[Int[Tensor, " B"], Float[Tensor, " B"]] | None = None,
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Compute `reference_sample` on a GPU, for supported logits; write to `out` if given.

    The host doesn't read keys or positions, so a CUDA graph of the call can be replayed with
    different ones. The uniform numbers are bit-identical to the reference's. Scores are in fp32;
    their distances to the highest score are truncated to 2^-27 nats, and weights to 2^-44 of the
    highest: a token differs only if its uniform number is that close to a boundary.
    """
    batch, vocabulary_size = logits.shape
    tokens, logprobs = out or (
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
        temperature=draw.temperature,
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


def self_test(gpu: Gpu, defines: Macros) -> bool:
    """Return whether greedy and random samples of four sequences match `reference_sample`."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4, 300, generator=generator)
    logits = logits.to(DTYPES_BY_NAME[str(defines["NUMBER"])])
    numbers = torch.arange(8).view(2, 4)
    on_gpu = numbers.to(gpu.device)
    for draw in (
        Draw(seed=1, temperature=0.0),
        Draw(seed=1, temperature=0.9, top_k=50, top_p=0.9, min_p=0.01),
    ):
        out = (
            torch.full_like(on_gpu[0], -1),
            torch.full(on_gpu[0].shape, torch.nan, device=gpu.device),
        )
        tokens, logprobs = launch(
            logits.to(gpu.device), on_gpu[0], on_gpu[1], draw, gpu=gpu, out=out
        )
        expected = reference_sample(logits, numbers[0], numbers[1], draw)
        is_close = torch.allclose(logprobs.cpu(), expected[1], rtol=0, atol=LOGPROB_ERROR)
        if not is_close or not torch.equal(tokens.cpu(), expected[0]):
            return False
    return True
