"""Bad input of the operator, and what comes of it: see `tests.pipeline.kernels.bad_input`."""

import torch
from torch import Tensor

from pipeline.kernels.products import cpu, dispatch
from tests.pipeline.kernels.operator_inputs import (
    BF16,
    Inputs,
    Operator,
    odd,
    shifted,
    strided,
)


def matrices() -> Inputs:
    """Numbers whose products and sums bf16 holds."""
    return {
        "shift": torch.arange(9).to(BF16),
        "a": torch.arange(40 * 6).view(40, 6).remainder(3).to(BF16),
        "b": torch.arange(6 * 9).view(6, 9).remainder(5).to(BF16),
        "out": torch.full((40, 9), torch.nan, dtype=BF16),
    }


def multiply(inputs: Inputs) -> Tensor:
    with dispatch.in_place():
        try:
            torch.addmm(inputs["shift"], inputs["a"], inputs["b"], out=inputs["out"])
        except RuntimeError as error:
            raise ValueError(str(error)) from error
    return inputs["out"].double()


def multiplied(inputs: Inputs) -> Tensor:
    shift, a, b = (inputs[name].double() for name in ("shift", "a", "b"))
    return shift + a @ b


PRODUCT = Operator(
    matrices,
    multiply,
    multiplied,
    {
        "good": lambda _: {},
        "dtype": lambda given: {name: each.double() for name, each in given.items()},
        "another dtype": lambda given: {"b": given["b"].float()},
        "stride": lambda given: {"a": strided(given["a"])},
        "turned": lambda given: {name: given[name].T.contiguous().T for name in ("a", "b")},
        "stride of the shift": lambda given: {"shift": strided(given["shift"])},
        "stride of the result": lambda given: {"out": strided(given["out"])},
        "address": lambda given: {"a": odd(given["a"])},
        "another address": lambda given: {"b": shifted(given["b"])},
        "no rows": lambda given: {"a": given["a"][:0], "out": given["out"][:0]},
        "no inputs": lambda given: {"a": given["a"][:, :0], "b": given["b"][:0]},
        "a shift of all": lambda given: {"shift": given["a"][:, :1].expand(40, 9).contiguous()},
        "another number of inputs": lambda given: {"b": given["b"][:4]},
        "another shift": lambda given: {"shift": given["shift"][:4]},
        "another result": lambda given: {"out": given["out"][:4].clone()},
    },
    on_gpu=False,
)


OPERATORS = {"product": PRODUCT}

KERNELS = ((cpu, "multiply"),)
"""What counts as the CPU's kernel when it is called: attributes of what has them."""

EXPECTED = {
    "product: good": "right by the kernel",
    "product: dtype": "right by PyTorch",
    "product: another dtype": (
        "refused: self and mat2 must have the same dtype, but got BFloat16 and Float"
    ),
    "product: stride": "right by the kernel",
    "product: turned": "right by the kernel",
    "product: stride of the shift": "right by the kernel",
    "product: stride of the result": "right by PyTorch",
    "product: address": "right by the kernel",
    "product: another address": "right by the kernel",
    "product: no rows": "right by PyTorch",
    "product: no inputs": "right by PyTorch",
    "product: a shift of all": "right by the kernel",
    "product: another number of inputs": (
        "refused: mat1 and mat2 shapes cannot be multiplied (40x6 and 4x9)"
    ),
    "product: another shift": (
        "refused: The expanded size of the tensor (9) must match the existing size (4) at"
        " non-singleton dimension 1.  Target sizes: [40, 9].  Tensor sizes: [4]"
    ),
    "product: another result": "right by PyTorch",
}
"""By operator and what is bad of its input."""
