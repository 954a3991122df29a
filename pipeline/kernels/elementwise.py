"""RMSNorm, rotary embedding, SwiGLU's gate and 4-bit codes in fp32 on the CPU."""

import ctypes
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from pipeline.kernels import choice
from pipeline.kernels.build import FUSED, Library, build, gomp_parallel


@cache
def library() -> Library | None:
    """Build the kernels; return None if they can't be built."""
    built = build(Path(__file__).with_suffix(".cpp"), {}, FUSED)
    return choice.resolve("RMSNorm, rotary embedding, SwiGLU and codes", built)


def prepare_norm(
    x: Float[Tensor, "*B K"], weight: Float[Tensor, " K"], out: Float[Tensor, "*B K"], eps: float
) -> Callable[[], object] | None:
    """Return a callable that writes x / sqrt(mean(x^2) + eps) * weight, or None if unsupported."""
    tensors, size = (x, weight, out), x.shape[-1]
    if not all(is_supported(tensor) and tensor.is_contiguous() for tensor in tensors):
        return None
    if not (built := library()):
        return None
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    sizes = ctypes.c_int64(x.numel() // size), ctypes.c_int64(size)
    return partial(built.rms_norm, *pointers, *sizes, ctypes.c_float(eps))


def prepare_silu_product(
    x: Float[Tensor, "*B K"], up: Float[Tensor, "*B K"], out: Float[Tensor, "*B K"]
) -> Callable[[], object] | None:
    """Return a callable that writes silu(x) * up (Shazeer 2020, eq. 6), or None if unsupported."""
    tensors = (x, up, out)
    if not all(is_supported(tensor) and tensor.is_contiguous() for tensor in tensors):
        return None
    if x.shape != up.shape or not (built := library()):
        return None
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    return partial(built.silu_product, *pointers, ctypes.c_int64(x.numel()))


def prepare_rotation(
    x: Float[Tensor, "1 H N D"],
    cos: Float[Tensor, "1 1 N D"],
    sin: Float[Tensor, "1 1 N D"],
    out: Float[Tensor, "1 H N D"],
) -> Callable[[], object] | None:
    """Return a callable that writes (x1, x2) cos + (-x2, x1) sin, or None if unsupported."""
    tensors = (x, cos, sin, out)
    if not all(is_supported(tensor) for tensor in tensors) or cos.stride() != sin.stride():
        return None
    if not (built := library()):
        return None
    _, num_heads, num_tokens, size = x.shape
    sizes = num_heads, num_tokens, size // 2, *x.stride()[1:3], cos.stride(2), *out.stride()[1:3]
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    return partial(built.rotate, *pointers, *map(ctypes.c_int64, sizes))


def dequantize(
    codes: UInt8[Tensor, " C"],
    pairs: Int64[Tensor, " 256"],
    scales: Float[Tensor, " B"],
    out: Float[Tensor, "B 64"],
) -> bool:
    """Write each byte's two fp32 numbers times their block's scale; return False if unsupported."""
    if choice.kernel_mode() == "off" or not is_supported(out) or not (built := library()):
        return False
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (codes, pairs, scales, out)]
    threads = ctypes.c_int32(torch.get_num_threads())
    built.dequantize(*pointers, ctypes.c_int64(len(scales)), gomp_parallel(), threads)
    return True


def is_supported(tensor: Tensor) -> bool:
    """Return whether the kernels support a tensor."""
    return (tensor.dtype, tensor.device.type, tensor.stride(-1)) == (torch.float32, "cpu", 1)
