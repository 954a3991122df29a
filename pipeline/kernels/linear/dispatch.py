"""Linear layers of few rows on the CPU, by a kernel where it has PyTorch's bits.

The definition is `torch.nn.functional.linear` of many rows.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from pipeline.kernels import choice
from pipeline.kernels.linear.cpu import FEWEST_OUTPUTS, MOST_ROWS, Linear, kernel, library, make
from pipeline.kernels.toolchain.cpp import NUMBERS, Built


def prepare(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Linear | None:
    """What writes x w^T + bias into `out`, with the bits that PyTorch has for many rows.

    Made for x (*B, K), weight (N, K) or the transpose of a contiguous (K, N), bias (N) and out
    (*B, N), side by side; any others may be asked for. None where PyTorch is to do the work: of
    what is not a linear layer of few rows on the CPU without a word, else the log says why.

    Raises:
        KernelError: kernels are required, and there is none for these.
    """
    kernels = choice.kernel_mode()
    if kernels == "off" or not is_of_few_rows(x, weight, bias, out):
        return None
    found = next(refusals(x, weight, bias, out), None) or kernel(
        x.dtype, *weight.T.shape, turned=not weight.is_contiguous()
    )
    if isinstance(found, str):
        choice.settle("linear layers", found, kernels)
        return None
    return make(*found, x, weight, bias, out)


def is_of_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> bool:
    """Whether these are a linear layer of few rows on the CPU, for which there is a kernel at all.

    A sum of a product and a matrix, which may look like one, is none.
    """
    tensors = (x, weight, out) if bias is None else (x, weight, out, bias)
    if any(tensor.device.type != "cpu" for tensor in tensors) or x.ndim < 2 or weight.ndim != 2:
        return False
    outputs, inputs = weight.shape
    return (
        x.shape[-1] == inputs
        and out.shape == (*x.shape[:-1], outputs)
        and (bias is None or bias.shape == (outputs,))
        and 0 < x.numel() <= MOST_ROWS * inputs
    )


def refusals(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Iterator[str]:
    """Why the kernel doesn't take a linear layer of few rows, in clauses; nothing where it does."""
    if x.dtype not in NUMBERS:
        yield f"it is written for fp32 and bf16, not {x.dtype}"
    named = {"x": x, "the weight": weight, "the bias": bias, "the result": out}
    for name, tensor in named.items():
        if tensor is None:
            continue
        if tensor.dtype != x.dtype:
            yield f"{name} is {tensor.dtype}, x {x.dtype}"
        if tensor.data_ptr() % tensor.element_size():
            yield f"{name} begins between the places of two numbers in memory"
        if not (tensor.is_contiguous() or (tensor is weight and weight.mT.is_contiguous())):
            yield f"the numbers of {name} don't lie side by side"
    if weight.shape[0] < FEWEST_OUTPUTS:
        yield f"it is written for {FEWEST_OUTPUTS} outputs and more, not {weight.shape[0]}"
    if x.shape[-1] % (4 // x.element_size() or 1):
        yield f"it is written for an even number of inputs, not {x.shape[-1]}"


def is_built(dtype: torch.dtype) -> bool:
    """Whether there is a kernel for this number format."""
    return dtype in NUMBERS and isinstance(library(dtype), Built)
