"""Number formats for which a processor has no instructions, so that fp32 is faster.

On a processor that multiplies bf16 a product of bf16 takes a third of the time of fp32. Elsewhere
it takes twice as long with AVX-512 alone, and with AVX2 five to fifteen times. fp16 takes four to
fifteen times as long on all processors but those that multiply it.
"""

import os
import platform

import torch

from pipeline.config import FrozenModelConfig, Precision, StepConfig
from pipeline.kernels.build import has_avx512, has_bf16_products, is_arm
from pipeline.launch.local import PLANNED


def is_slow(precision: Precision) -> bool:
    """Whether fp32 is faster on this machine's processor; known of x86, and of ARM for bf16."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    if precision == "bf16" and (is_x86 or is_arm()):
        return not has_bf16_products()
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
        if isinstance(model, FrozenModelConfig) and is_slow(model.precision)
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
