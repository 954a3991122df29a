"""Whether an operator takes its kernel, and what is said where there is none."""

import functools
import logging
import os
from collections.abc import Mapping
from typing import get_args

import torch

from pipeline.config import Kernels
from pipeline.errors import ConfigError, KernelError
from pipeline.kernels.cuda.check import is_right
from pipeline.kernels.cuda.gpu import Gpu, gpu_of

logger = logging.getLogger(__name__)

SWITCH = "RLHF_PIPELINE_KERNELS"
"""Variable of the environment: auto, required or off for the kernels of generation."""


def kernel_mode() -> Kernels:
    """What the environment says about the kernels of generation; auto if nothing.

    Raises:
        ConfigError: it says something else.
    """
    word = os.environ.get(SWITCH, "auto")
    for known in get_args(Kernels):
        if word == known:
            return known
    raise ConfigError(f"the variable {SWITCH} must be {', '.join(get_args(Kernels))}: {word!r}")


def wanted(device: torch.device) -> bool:
    """Whether an operator of generation is to look for a kernel for GPUs there."""
    return device.type == "cuda" and kernel_mode() != "off"


def gpu_for(
    operator: str,
    device: torch.device,
    refusal: str | None,
    source: str,
    defines: Mapping[str, str | int],
) -> Gpu | None:
    """The GPU that does an operator of generation by the kernel of the same name as its source.

    Args:
        operator: its name in sentences.
        device: where the tensors are.
        refusal: why the kernel can't take the tensors, if it can't.
        source: name of the source and of the kernel in it.
        defines: macros of the specialisation.

    Returns:
        None where PyTorch is to do the work; the log says why, once for each reason.

    Raises:
        KernelError: kernels are required, and there is none.
    """
    found = refusal or find(device, source, defines)
    if isinstance(found, Gpu):
        return found
    settle(operator, found, kernel_mode())
    return None


def find(device: torch.device, source: str, defines: Mapping[str, str | int]) -> Gpu | str:
    """The GPU with the kernel of a source ready, or why it can't be had, in a clause."""
    return _compiled(device, source, frozenset(defines.items()))


@functools.cache
def _compiled(
    device: torch.device, source: str, defines: frozenset[tuple[str, str | int]]
) -> Gpu | str:
    """Found out once in a process, in the pass that comes before any of a CUDA graph."""
    macros = dict(defines)
    try:
        gpu = gpu_of(device)
        gpu.kernel(source, source, macros)
        if not is_right(gpu, source, macros):
            return f"{source} computes something else than its definition on this GPU"
    except KernelError as error:
        return str(error)
    return gpu


def settle(operator: str, reason: str, kernels: Kernels) -> None:
    """Go on without a kernel, and say so once for each reason.

    Raises:
        KernelError: it is required.
    """
    if kernels == "required":
        raise KernelError(
            f"the kernel of {operator} can't be had: {reason}; mend that, or have PyTorch do its"
            f" work: set kernels auto, and {SWITCH}=auto for generation"
        )
    _say_once(operator, reason)


@functools.cache
def _say_once(operator: str, reason: str) -> None:
    logger.info("PyTorch does the work of the kernel of %s: %s", operator, reason)
