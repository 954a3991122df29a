"""Which collectives the processes of an engine use."""

from collections import Counter

import torch

from pipeline.config.zero import ZeroConfig
from pipeline.distributed import gather_objects, world_size
from pipeline.engine.comm import Collectives, GroupCollectives
from pipeline.engine.shared_memory import SharedMemoryCollectives, on_one_machine
from pipeline.position import SAME_ORDER, DesyncError

_TAKEN = Counter[str]()
"""How often each name was given to an engine of this process."""


def make_collectives(device: torch.device, zero: ZeroConfig, *, name: str) -> Collectives:
    """The fastest collectives between the processes there are; all of them call it in step.

    The second engine of a name gets a number behind it, so that each has a name of its own.

    Raises:
        DesyncError: the processes build different engines.
    """
    name = _unique(name)
    pin_memory = zero.offload.pin_memory
    if world_size() == 1:
        return Collectives(device, name, pin_memory=pin_memory)
    if device.type == "cpu" and zero.shared_memory and on_one_machine():
        return SharedMemoryCollectives(name)
    deterministic = zero.reduction == "deterministic"
    return GroupCollectives(device, name, deterministic=deterministic, pin_memory=pin_memory)


def _unique(name: str) -> str:
    given = gather_objects((name, _TAKEN[name] + 1))
    for other, (theirs, _) in enumerate(given):
        if theirs != given[0][0]:
            raise DesyncError(
                f"rank 0 builds the engine {given[0][0]!r} while rank {other} builds {theirs!r};"
                f" {SAME_ORDER}"
            )
    _TAKEN[name] = number = max(count for _, count in given)
    return name if number == 1 else f"{name} {number}"
