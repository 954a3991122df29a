"""Random tensors, and errors against float64."""

import math

import torch
from torch import Tensor


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return normal numbers, the same for each seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(result: Tensor, exact: Tensor) -> float:
    """Return the error relative to the norm; infinite with a NaN."""
    norm = exact.norm().item() or 1.0
    error = ((result.double() - exact).norm() / norm).item()
    return error if math.isfinite(error) else math.inf
