"""The call of `cpu.cpp`, and which processors and tensors it is for."""

import ctypes
import functools
from pathlib import Path

import torch
from jaxtyping import BFloat16
from torch import Tensor

from pipeline.kernels.linear import cpu as linear
from pipeline.kernels.toolchain.cpp import FUSED, NUMBERS, Built, NotBuiltError, found
from pipeline.kernels.toolchain.levels import has_bf16_products
from pipeline.kernels.toolchain.threads import parallel

SOURCE = Path(__file__).with_name("cpu.cpp")

ORDER = linear.Order(256, bias_first=False)
"""In which products are added up; the block is the source's."""

FEW_ROWS = 32
"""Up to that many, the kernel of few rows is faster: it reads a weight ahead."""


class Matrix(ctypes.Structure):
    """A tensor (B, rows, columns), of which one of the last two dimensions lies side by side."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "row", "column")),
    ]


class Product(ctypes.Structure):
    """One product; the source has the same structure."""

    _fields_ = [
        *((name, Matrix) for name in ("a", "b", "shift", "out")),
        *((name, ctypes.c_int64) for name in ("batch", "rows", "inputs", "outputs")),
        *((name, ctypes.c_float) for name in ("alpha", "beta")),
    ]


@functools.cache
def is_needed() -> bool:
    """Whether PyTorch's own products of bf16 are slow on this machine's processor."""
    return not has_bf16_products()


@functools.cache
def library() -> Built | NotBuiltError:
    """The kernel, or why it can't be had; found out once in a process."""
    return found(SOURCE, {"NUMBER": NUMBERS[torch.bfloat16]}, FUSED)


def takes(matrix: BFloat16[Tensor, "B rows columns"]) -> bool:
    """Whether the rows or the columns of a matrix lie side by side."""
    return 1 in matrix.stride()[1:] and matrix.data_ptr() % matrix.element_size() == 0


def multiply(
    a: BFloat16[Tensor, "B M K"],
    b: BFloat16[Tensor, "B K N"],
    shift: BFloat16[Tensor, "B M N"] | None,
    out: BFloat16[Tensor, "B M N"],
    *,
    alpha: float,
    beta: float,
    built: Built,
) -> None:
    """Write alpha a b + beta shift into `out`; nothing is checked here.

    Args:
        a: one that the kernel takes.
        b: one that the kernel takes.
        shift: any, of the stride 0 where it is spread.
        out: the numbers of a row lie side by side.
        alpha: of the product.
        beta: of the shift.
        built: the kernel.
    """
    if (alpha, beta) == (1.0, 1.0) and _multiply_few(a, b, shift, out):
        return
    call = Product(
        _matrix(a),
        _matrix(b),
        Matrix() if shift is None else _matrix(shift),
        _matrix(out),
        *(a.shape[0], a.shape[1], a.shape[2], b.shape[2]),
        *(alpha, beta),
    )
    threads = ctypes.c_int32(torch.get_num_threads())
    built.library.multiply(ctypes.byref(call), parallel(), threads)


def _multiply_few(
    a: BFloat16[Tensor, "B M K"],
    b: BFloat16[Tensor, "B K N"],
    shift: BFloat16[Tensor, "B M N"] | None,
    out: BFloat16[Tensor, "B M N"],
) -> bool:
    """Multiply by the kernel of few rows, in the same order; False where it doesn't take these."""
    if len(a) > 1 or a.shape[1] > FEW_ROWS or a.shape[2] % 2:
        return False
    few = linear.library(torch.bfloat16)
    x, weight, bias = a[0], b[0].T, None if shift is None else shift[0, 0]
    if isinstance(few, NotBuiltError) or not (x.is_contiguous() and out.is_contiguous()):
        return False
    if not (weight.is_contiguous() or weight.T.is_contiguous()):
        return False
    if shift is not None and shift.stride() != (0, 0, 1):
        return False
    linear.make(few, ORDER, x, weight, bias, out[0])()
    return True


def _matrix(tensor: BFloat16[Tensor, "B rows columns"]) -> Matrix:
    """Where a tensor's numbers lie."""
    return Matrix(tensor.data_ptr(), *tensor.stride())
