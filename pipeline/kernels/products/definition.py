"""What a product of bf16 matrices is, in plain PyTorch.

Dimension names: B batch, M rows, K inputs, N outputs.
"""

import torch
from jaxtyping import BFloat16
from torch import Tensor


def product(
    a: BFloat16[Tensor, "B M K"],
    b: BFloat16[Tensor, "B K N"],
    shift: BFloat16[Tensor, "B M N"] | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> BFloat16[Tensor, "B M N"]:
    """The sum alpha a b + beta shift, added up in fp32 and rounded once; in no defined order."""
    total = alpha * (a.float() @ b.float())
    if shift is not None:
        total = total + beta * shift.float()
    return total.to(torch.bfloat16)
