"""Weights that are no numbers answer nothing and train nothing: they are refused when loaded."""

import torch
from torch import Tensor, nn

from pipeline.engine.stored import StoredParameter
from pipeline.errors import ModelError


def require_finite(model: nn.Module, path: str) -> None:
    """Refuse a model whose parameters hold NaN or infinity; what is still in files is not read.

    One pass over the weights, on the device where they are.

    Raises:
        ModelError: the first such parameter, and how many there are.
    """
    broken = [
        name
        for name, param in model.named_parameters()
        if not isinstance(param, StoredParameter) and not is_finite(param)
    ]
    if broken:
        dtype = next(model.parameters()).dtype
        raise ModelError(f"{path}: {sentence(broken[0], more=len(broken) - 1, dtype=dtype)}")


@torch.no_grad()
def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite, without a tensor of its size beside it."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    low, high = tensor.aminmax()  # both are NaN where any element is
    return bool(torch.isfinite(low) & torch.isfinite(high))


def sentence(name: str, *, dtype: torch.dtype, more: int = 0) -> str:
    """What is wrong with a parameter that is not finite, and what to do."""
    others = f" and {more} more weights hold" if more else " holds"
    narrow = ", or has numbers too large for fp16: try precision bf16 or fp32"
    return (
        f"{name}{others} NaN or infinity; the model is damaged or its training diverged: take an"
        f" earlier one, or download it again{narrow if dtype == torch.float16 else ''}"
    )
