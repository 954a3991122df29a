"""Linear layers on the CPU.

The kernel computes `torch.nn.functional.linear`. PyTorch's BLAS libraries are optimized for many
rows: with one to eight rows they reach at most half of the memory bandwidth.
"""

import ctypes
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from pipeline.kernels import build, choice
from pipeline.kernels.build import CPP_DTYPES, FUSED, Library


@functools.cache
def max_rows(dtype: torch.dtype) -> int:
    """Return the maximum number of rows for which to use the kernel, or 0 if the dtype has none.

    With many rows the product is compute-bound. MKL reaches that bound only on Intel processors.
    """
    if dtype == torch.float32:
        return 1 << 40 if build.has_avx512() and build.is_amd() else 64
    return 8 if dtype == torch.bfloat16 else 0


class LinearParams(ctypes.Structure):
    """`LinearParams` of linear.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs")),
    ]


@dataclass(frozen=True)
class Linear:
    """A linear layer on fixed memory, for repeated calls."""

    library: Library
    params: LinearParams
    rows: int
    """Number of rows of x and of the result."""

    tensors: tuple[Tensor, ...]
    """The tensors whose memory `params` points to; they keep it alive."""

    def set_rows(self, rows: int) -> None:
        """Compute only the first `rows` rows from now on."""
        assert 0 <= rows <= self.rows
        self.params.rows = rows

    def __call__(self) -> None:
        """Compute the product from the memory's current contents."""
        threads = ctypes.c_int32(torch.get_num_threads())
        self.library.linear(ctypes.byref(self.params), build.gomp_parallel(), threads)


def prepare(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Linear | None:
    """Return a callable that writes x w^T + bias to `out`, or None if PyTorch is used.

    Takes contiguous x (*B, K), weight (N, K), bias (N) and out (*B, N). The reason for using
    PyTorch is logged, unless it is another operator or device, or the number of rows.

    Raises:
        KernelError: kernels are required, and there is none for these tensors.
    """
    kernels = choice.kernel_mode()
    if kernels == "off" or not is_supported_layer(x, weight, bias, out):
        return None
    reason = next(find_problems(x, weight, bias, out), None)
    kernel = choice.resolve("linear layers", reason or library(x.dtype), kernels)
    if kernel is None:
        return None
    params = LinearParams(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        rows=x.numel() // x.shape[-1],
        inputs=x.shape[-1],
        outputs=weight.shape[0],
    )
    tensors = (x, weight, out) if bias is None else (x, weight, out, bias)
    return Linear(kernel, params, params.rows, tensors)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Compute a linear layer with the kernel; return None if PyTorch is used, as in `prepare`."""
    if not all(type(tensor) in (Tensor, Parameter) for tensor in (x, weight)):
        return None
    out = x.new_empty(*x.shape[:-1], len(weight))
    if call := prepare(x.contiguous(), weight, bias, out):
        call()
        return out
    return None


class LinearKernelMode(TorchFunctionMode):
    """Context manager in which the kernel computes linear layers if gradients are disabled."""

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run a function, with the kernel if possible; PyTorch calls this for each function."""
        is_layer = func is F.linear and not kwargs and not torch.is_grad_enabled()
        if is_layer and (out := linear(*args)) is not None:
            return out
        return func(*args, **(kwargs or {}))


def is_supported_layer(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> bool:
    """Return whether this is a linear layer on the CPU with at most `max_rows` rows.

    An `addmm` that adds a matrix, which looks similar, is not one.
    """
    tensors = (x, weight, out) if bias is None else (x, weight, out, bias)
    if any(tensor.device.type != "cpu" for tensor in tensors) or x.ndim < 2 or weight.ndim != 2:
        return False
    outputs, inputs = weight.shape
    return (
        x.shape[-1] == inputs
        and out.shape == (*x.shape[:-1], outputs)
        and (bias is None or bias.shape == (outputs,))
        and 0 < x.numel() <= max_rows(x.dtype) * inputs
    )


def find_problems(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Iterator[str]:
    """Yield the reasons why the kernel doesn't support a linear layer."""
    tensors = {"x": x, "the weight": weight, "the bias": bias, "the result": out}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype != x.dtype:
            yield f"{name} is {tensor.dtype}, but x is {x.dtype}"
        if tensor.data_ptr() % tensor.element_size():
            yield f"{name} is not aligned to its element size"
        if not tensor.is_contiguous():
            yield f"{name} is not contiguous"
    if x.shape[-1] % (4 // x.element_size() or 1):
        yield f"it supports only an even number of inputs, not {x.shape[-1]}"


@functools.cache
def library(dtype: torch.dtype) -> Library | str:
    """Build the kernel for this dtype, or return the reason why it can't be built."""
    source = Path(__file__).with_suffix(".cpp")
    return build.build(source, {"NUMBER": CPP_DTYPES[dtype]}, (*FUSED, *build.bf16_flags()))


def has_kernel(dtype: torch.dtype) -> bool:
    """Return whether there is a kernel for this dtype."""
    return dtype in CPP_DTYPES and isinstance(library(dtype), Library)
