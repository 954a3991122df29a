"""The calls of `cpu.cpp`, tokens drawn from log-probabilities, and of `cpu_cut.cpp`."""

import ctypes
import functools
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, UInt64
from torch import Tensor

from pipeline.kernels.build import EXACT, FUSED, NUMBERS, Built, NotBuiltError, found, parallel

SOURCE = Path(__file__).with_name("cpu.cpp")
CUT = Path(__file__).with_name("cpu_cut.cpp")


class Draw(ctypes.Structure):
    """One call; the source has the same structure."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("logprobs", "keys", "positions", "tokens", "chosen")
        ),
        *((name, ctypes.c_int64) for name in ("rows", "words")),
        ("seed", ctypes.c_uint64),
    ]


@functools.cache
def library() -> Built | NotBuiltError:
    """The kernel, or why it can't be had; found out once in a process."""
    return found(SOURCE, {"NUMBER": NUMBERS[torch.float32]}, FUSED)


def draw(
    logprobs: Float[Tensor, "B V"],
    keys: UInt64[np.ndarray, " B"],
    positions: UInt64[np.ndarray, " B"],
    *,
    seed: int,
    built: Built,
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Tokens, and their log-probabilities; nothing is checked here.

    Args:
        logprobs: fp32, side by side.
        keys: number of each sequence, side by side.
        positions: of each sequence's token, side by side.
        seed: with key and position it gives the share of the cumulative weight that is drawn.
        built: the kernel.
    """
    rows, words = logprobs.shape
    tokens, chosen = logprobs.new_empty(rows, dtype=torch.long), logprobs.new_empty(rows)
    call = Draw(
        logprobs.data_ptr(),
        keys.ctypes.data,
        positions.ctypes.data,
        tokens.data_ptr(),
        chosen.data_ptr(),
        rows,
        words,
        seed % 2**64,
    )
    threads = ctypes.c_int32(torch.get_num_threads())
    built.library.draw(ctypes.byref(call), parallel(), threads)
    return tokens, chosen


class Cut(ctypes.Structure):
    """One call of `cut`; the source has the same structure."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weights", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "words", "top_k")),
        ("top_p", ctypes.c_double),
    ]


@functools.cache
def cut_library() -> Built | NotBuiltError:
    """The kernel that cuts, or why it can't be had; found out once in a process."""
    return found(CUT, {}, EXACT)


def cut(
    weights: Float[Tensor, "B V"],
    out: Float[Tensor, "..."],
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    built: Built,
) -> bool:
    """Write what is left of weights, or of `top_k` the least of each row; False if one is NaN.

    Nothing is checked here.

    Args:
        weights: float64, side by side.
        out: (B, V) for `top_p`, (B, 1) for `top_k`.
        top_k: how many, up to V; 0 cuts by `top_p`.
        top_p: the share that is kept, as a sum of weights.
        built: the kernel.
    """
    call = Cut(weights.data_ptr(), out.data_ptr(), *weights.shape, top_k, top_p)
    threads = ctypes.c_int32(torch.get_num_threads())
    return bool(built.library.cut(ctypes.byref(call), parallel(), threads))
