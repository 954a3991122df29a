"""Number formats for which a processor has no instructions, so that fp32 is faster.

On a processor that multiplies bf16 a product of bf16 takes a third of the time of fp32; with
AVX-512 alone it takes twice as long as fp32, and with AVX2 two to seven times. fp16 takes four to
fifteen times as long on all of them but those that multiply it.
"""

import os
import platform

import torch

from pipeline.config import FrozenModelConfig, Precision, StepConfig
from pipeline.launch.environment import PLANNED


def is_slow(precision: Precision) -> bool:
    """Whether fp32 is faster on this machine's processor. Known of x86 alone, else False."""
    if precision in ("auto", "fp32") or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    # PyTorch heeds ATEN_CPU_CAPABILITY here. It doesn't promise its other questions.
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return True
    names = {
        "bf16": ("_is_avx512_bf16_supported", "_is_amx_tile_supported"),
        "fp16": ("_is_amx_fp16_supported",),
    }[precision]
    return not any(getattr(torch.cpu, name, lambda: False)() for name in names)


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
