"""Which models decode without their modules."""

import logging
from functools import cache

import torch
from torch import nn

from inference.tp_group import is_of_sharding
from pipeline.parallel.group import Group

logger = logging.getLogger(__name__)


def replays_passes(model: nn.Module, tp_group: Group, device: torch.device) -> bool:
    """Whether decoding passes may be repeated without the model's modules.

    Those of a model that is divided among processes may on GPUs, where NCCL's collectives are part
    of a graph; a trace of a CPU's operators has none.
    """
    if has_hooks(model):
        return False
    if tp_group.size > 1 and device.type == "cpu":
        _log_divided()
        return False
    return True


def has_hooks(model: nn.Module) -> bool:
    """Whether somebody wants to be called when its modules are.

    Hooks by which processes compute its layers together are the model's own.
    """
    return any(
        not is_of_sharding(hook)
        for each in model.modules()
        for hook in (*each._forward_hooks.values(), *each._forward_pre_hooks.values())  # noqa: SLF001
    )


@cache
def _log_divided() -> None:
    logger.info(
        "decoding goes through the model's modules each time: on CPUs the processes that compute"
        " each layer together meet in its middle, which a trace of operators does not record"
    )
