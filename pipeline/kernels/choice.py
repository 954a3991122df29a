"""Whether an operator uses its kernel, and the message where there is none."""

import functools
import logging
import os
from collections.abc import Callable
from typing import get_args

import torch

from pipeline.config import Kernels
from pipeline.errors import ConfigError, KernelError
from pipeline.kernels.gpu import Gpu, LaunchError, Macros, gpu_of

logger = logging.getLogger(__name__)

SWITCH = "RLHF_PIPELINE_KERNELS"
"""Variable of the environment: auto, required or off for the kernels of generation."""

SelfTest = Callable[[Gpu, Macros], bool]
"""Whether a kernel computes on a GPU what it is defined as: asked once in a process, before it is
trusted. It waits for the GPU, so it can't be part of a CUDA graph."""


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
    name: str,
    defines: Macros,
    self_test: SelfTest,
) -> Gpu | None:
    """The GPU that does an operator of generation.

    Args:
        operator: its name in sentences.
        device: where the tensors are.
        refusal: why the kernel can't take the tensors, if it can't.
        name: of the operator's folder and of its kernel.
        defines: macros of the specialisation.
        self_test: what the kernel must pass.

    Returns:
        None where PyTorch is to do the work; the log says why, once for each reason.

    Raises:
        KernelError: kernels are required, and there is none.
    """
    found = refusal or find(device, name, defines, self_test)
    if isinstance(found, Gpu):
        return found
    settle(operator, found, kernel_mode())
    return None


def find(device: torch.device, name: str, defines: Macros, self_test: SelfTest) -> Gpu | str:
    """The GPU with an operator's kernel ready, or why it can't be had, in a clause."""
    return _compiled(device, name, frozenset(defines.items()), self_test)


@functools.cache
def _compiled(
    device: torch.device,
    name: str,
    defines: frozenset[tuple[str, str | int]],
    self_test: SelfTest,
) -> Gpu | str:
    """Found out once in a process, in the pass that comes before any of a CUDA graph."""
    macros = dict(defines)
    try:
        gpu = gpu_of(device)
        gpu.kernel(name, name, macros)
        if self_test(gpu, macros):
            return gpu
        gpu.forget(name, macros)  # what was kept of it may be to blame
    except (KernelError, LaunchError) as error:
        return str(error)
    return f"{name} computes something else than its definition on this GPU"


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
