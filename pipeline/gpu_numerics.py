"""How GPUs round for as long as a step lasts: TF32, and kernels that add up in one order."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import torch

from pipeline.config import StepConfig, TrainedModelConfig


@contextmanager
def gpu_numerics(config: StepConfig) -> Iterator[None]:
    """Round as the settings say; CPUs are left as they are.

    With `tf32` products of fp32 matrices have 10 bits of mantissa (Ampere and later). Where a model
    has `zero.reduction: deterministic`, operators with a kernel of one order of additions take it,
    and cuBLAS has the workspace that this needs. Others warn; attention, whose backward passes take
    such a kernel only where they may not, is held to it by `pipeline.models.in_order`.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    in_order = torch.cuda.is_available() and is_deterministic(config)
    if in_order:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Buffers are written before they are read: nothing need fill them.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
        if in_order:
            torch.use_deterministic_algorithms(mode=False)


def is_deterministic(config: StepConfig) -> bool:
    """Whether a model of the step sums its gradients in one order."""
    values = [getattr(config, each.name) for each in fields(config)]
    trained = [each for each in values if isinstance(each, TrainedModelConfig)]
    return any(each.zero.reduction == "deterministic" for each in trained)
