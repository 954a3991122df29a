"""Choice between an operator's kernel and PyTorch, and the message if there is no kernel."""

import functools
import logging
import os
from typing import TypeVar, get_args

import torch

from pipeline.config import Kernels
from pipeline.kernels.gpu import Gpu, LaunchError, Macros, get_gpu
from pipeline.system.errors import ConfigError, KernelError

logger = logging.getLogger(__name__)

T = TypeVar("T")

KERNELS_VARIABLE = "RLHF_PIPELINE_KERNELS"
"""Environment variable for the kernels of generation: auto, required or off."""


def kernel_mode() -> Kernels:
    """Return the `kernels` setting for generation.

    Raises:
        ConfigError: the environment variable has an invalid value.
    """
    value = os.environ.get(KERNELS_VARIABLE, "auto")
    for mode in get_args(Kernels):
        if value == mode:
            return mode
    raise ConfigError(
        f"the environment variable {KERNELS_VARIABLE} must be one of"
        f" {', '.join(get_args(Kernels))}, got {value!r}"
    )


def use_gpu(device: torch.device) -> bool:
    """Return whether the operators of generation use CUDA kernels on this device."""
    return device.type == "cuda" and kernel_mode() != "off"


def resolve(operator: str, kernel: T | str, kernels: Kernels | None = None) -> T | None:
    """Return `kernel`; if it is a reason why PyTorch is used, log it once and return None.

    The reason is a clause. `kernels` is the setting, by default the one for generation.

    Raises:
        KernelError: kernels are required.
    """
    if not isinstance(kernel, str):
        return kernel
    if (kernels or kernel_mode()) == "required":
        raise KernelError(
            f"the kernel for {operator} is not available: {kernel}; fix this, or fall back to"
            f" PyTorch by setting kernels to auto (for generation, {KERNELS_VARIABLE}=auto)"
        )
    _log_once(operator, kernel)
    return None


def load_kernel(device: torch.device, name: str, defines: Macros) -> Gpu | str:
    """Compile a kernel; return its GPU, or the reason why it can't be used."""
    return _compile(device, name, frozenset(defines.items()))


@functools.cache
def _compile(
    device: torch.device, name: str, defines: frozenset[tuple[str, str | int]]
) -> Gpu | str:
    try:
        gpu = get_gpu(device)
        gpu.kernel(name, name, dict(defines))
    except (KernelError, LaunchError) as error:
        return str(error)
    return gpu


@functools.cache
def _log_once(operator: str, reason: str) -> None:
    logger.info("using PyTorch instead of the kernel for %s: %s", operator, reason)
