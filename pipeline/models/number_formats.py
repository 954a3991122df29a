"""Number formats for which a processor has no instructions, so that fp32 is faster.

On a processor that multiplies bf16 a product of bf16 takes a third of the time of fp32. Elsewhere
it takes as long as fp32 by the kernel of `pipeline.kernels.products`; by PyTorch twice as long with
AVX-512 alone, and with AVX2 five to fifteen times. fp16 takes four to fifteen times as long on all
of them but those that multiply it.
"""

import os
import platform

import torch

from pipeline.config import FrozenModelConfig, Kernels, Precision, StepConfig
from pipeline.kernels.products.cpu import is_needed, library
from pipeline.kernels.toolchain.cpp import Built
from pipeline.kernels.toolchain.levels import has_avx512, is_arm
from pipeline.launch.local import PLANNED
from pipeline.models.load import kernels_of


def is_slow(precision: Precision, kernels: Kernels = "auto") -> bool:
    """Whether fp32 is faster on this machine's processor; known of x86, and of ARM for bf16.

    Args:
        precision: of the weights.
        kernels: whether products of bf16 may be a kernel's.
    """
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    if precision == "bf16" and (is_x86 or is_arm()):
        has_kernel = kernels != "off" and isinstance(library(), Built)
        return is_needed() and not has_kernel
    # PyTorch doesn't promise its question; unasked the answer is no.
    multiplies = getattr(torch.cpu, "_is_amx_fp16_supported", lambda: False)
    return precision == "fp16" and is_x86 and not (has_avx512() and multiplies())


def slow_formats(config: StepConfig, *, section: str) -> str | None:
    """A sentence on the models of a step in a format that is slow here; None where there is none.

    Args:
        config: settings of the step.
        section: its name in files of settings, `ppo`.
    """
    if torch.cuda.is_available():
        return None
    slow = {
        name: model.precision
        for name, model in vars(config).items()
        if isinstance(model, FrozenModelConfig) and is_slow(model.precision, kernels_of(model))
    }
    if not slow:
        return None
    prefix = f"--{section}." if PLANNED in os.environ else "--"
    options = " ".join(f"{prefix}{name}.precision fp32" for name in slow)
    formats = " and ".join(sorted(set(slow.values())))
    return (
        f"this processor has no instructions for {formats}, and fp32 is several times as fast here,"
        f" in more memory: {options}"
    )
