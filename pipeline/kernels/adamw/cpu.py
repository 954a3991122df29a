"""The call of `cpu.cpp`."""

import ctypes
import functools
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeline.kernels.adamw.definition import AdamW, Weights
from pipeline.kernels.build import Built, NotBuiltError, found, parallel

SOURCE = Path(__file__).with_name("cpu.cpp")

FORMATS = {
    torch.float32: "Float32",
    torch.bfloat16: "BFloat16",
    torch.float16: "Float16",
    torch.uint8: "Code",
    None: "None",
}
"""What the source calls number formats; uint8 holds codes of moments."""


@dataclass(frozen=True)
class Variant:
    """Which of the source's loops is compiled: one for each set of number formats."""

    gradient: torch.dtype
    moments: torch.dtype
    copy: torch.dtype | None = None
    split: bool = False

    @classmethod
    def of(cls, weights: Weights, gradient: Tensor) -> "Variant":
        """The one for these vectors."""
        copy = None if weights.copy is None else weights.copy.dtype
        return cls(gradient.dtype, weights.exp_avg.dtype, copy, weights.low_bits is not None)

    @property
    def defines(self) -> dict[str, str | int]:
        """The macros that choose it."""
        return {
            "GRADIENT": FORMATS[self.gradient],
            "MOMENT": FORMATS[self.moments],
            "EIGHT_BITS": int(self.moments == torch.uint8),
            "COPY": FORMATS[self.copy],
            "HAS_COPY": int(self.copy is not None),
            "SPLIT": int(self.split),
        }


class Vectors(ctypes.Structure):
    """Where the vectors lie; the source has the same structure."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            *("master", "exp_avg", "exp_avg_sq", "exp_avg_exponents", "exp_avg_sq_exponents"),
            *("copy", "low_bits", "gradient"),
        )
    ]


class Numbers(ctypes.Structure):
    """The numbers of a step as the loop needs them; the source has the same structure."""

    _fields_ = [
        (name, ctypes.c_float)
        for name in (
            *("decay", "exp_avg_weight", "exp_avg_from_grad", "beta2", "exp_avg_sq_weight"),
            *("root_correction", "eps", "step_size", "multiplier"),
        )
    ]


@functools.cache
def library(variant: Variant) -> Built | NotBuiltError:
    """The variant's loop, or why it can't be had; found out once in a process."""
    return found(SOURCE, variant.defines)


def run(built: Built, weights: Weights, gradient: Tensor, step: AdamW, *, threads: int) -> None:
    """One step; the vectors are as the loop was built for, contiguous and on the CPU."""
    tensors = weights.tensors() | {"gradient": gradient}
    vectors = Vectors(**{name: tensor.data_ptr() for name, tensor in tensors.items()})
    built.library.adamw(
        ctypes.byref(vectors),
        ctypes.byref(numbers_of(step)),
        ctypes.c_int64(gradient.numel()),
        parallel(),
        ctypes.c_int32(threads),
    )


def numbers_of(step: AdamW) -> Numbers:
    """What is the same for all elements, each rounded to fp32 once."""
    beta1, beta2 = step.betas
    weight = ctypes.c_float(1 - beta1).value
    from_grad = weight >= 0.5  # from the nearer end, as `torch.lerp`
    return Numbers(
        decay=1 - step.lr * step.weight_decay,
        exp_avg_weight=weight - 1 if from_grad else weight,
        exp_avg_from_grad=from_grad,
        beta2=beta2,
        exp_avg_sq_weight=1 - beta2,
        root_correction=math.sqrt(1 - beta2**step.step),
        eps=step.eps,
        step_size=-step.lr / (1 - beta1**step.step),
        multiplier=step.multiplier,
    )
