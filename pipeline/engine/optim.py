"""The optimizer of an engine: an element-wise class of torch.optim over flat vectors."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pipeline.config import OptimConfig
from pipeline.kernels.adamw.definition import BLOCK

FUSED_DEVICES = ("cpu", "cuda")
"""Devices on which every fused class of torch.optim has its kernel."""


MOMENTS: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "8bit": torch.uint8,
}
"""In which type AdamW's moments are kept, by the setting `optim.moments`."""


def build_optimizer(groups: Sequence[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer that `optim` names, in its fused implementation where it has one.

    Args:
        groups: one or more of {"params": [flat fp32 parameter], "lr": ..., "weight_decay": ...}.
        optim: the class, its betas, eps and further arguments; an implementation that these ask for
            (fused, foreach) comes before the choice made here.
    """
    optimizer_class = getattr(torch.optim, optim.name)
    accepted = inspect.signature(optimizer_class).parameters
    arguments: dict[str, Any] = {"betas": optim.betas, "eps": optim.eps}
    devices = {param.device.type for group in groups for param in group["params"]}
    if devices <= set(FUSED_DEVICES) and "foreach" not in optim.params:
        arguments["fused"] = True
    arguments = {name: value for name, value in arguments.items() if name in accepted}
    own = [
        {name: value for name, value in group.items() if name == "params" or name in accepted}
        for group in groups
    ]
    return optimizer_class(own, **(arguments | optim.params))


def steps_in_parts(optim: OptimConfig) -> bool:
    """Whether parts of a vector may have weight decays of their own.

    It is AdamW's, which the engine steps by itself; other classes have one for a whole tensor.
    """
    return optim.name == "AdamW" and not optim.params


def block_of_moments(optim: OptimConfig) -> int:
    """Elements of a parameter whose moments are kept together: it begins at a multiple of them."""
    return BLOCK if optim.moments == "8bit" else 1


def steps_in_one_pass(optim: OptimConfig, device: torch.device) -> bool:
    """Whether `pipeline.kernels.adamw` has a kernel that does what this optimizer would do there.

    On a CPU to the same bits; on a GPU to the bits of the CPU.
    """
    return steps_in_parts(optim) and device.type in ("cpu", "cuda")
