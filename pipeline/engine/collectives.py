"""Which collectives the processes of an engine use."""

from collections import Counter

import torch

from pipeline.config.zero import ZeroConfig
from pipeline.engine.comm import Collectives, GroupCollectives
from pipeline.engine.copies import CollectivesOverCopies
from pipeline.engine.shared_memory import SharedMemoryCollectives
from pipeline.parallel.group import DataGroup, Group
from pipeline.parallel.shared_memory import on_one_machine
from pipeline.position import SAME_ORDER, DesyncError

_TAKEN = Counter[str]()
"""How often each name was given to an engine of this process."""


def make_collectives(
    device: torch.device, zero: ZeroConfig, group: Group, *, name: str
) -> Collectives:
    """The fastest collectives between the processes of a group; all of them call it in step.

    The second engine of a name gets a number behind it, so that each has a name of its own.

    Raises:
        DesyncError: the processes build different engines.
    """
    if isinstance(group, DataGroup):
        within = make_collectives(device, zero, group.shards, name=name)
        over = make_collectives(device, zero, group.copies, name=f"{name}, over its copies")
        return CollectivesOverCopies(device, within, over)
    name = _unique(name, group)
    pin_memory = zero.offload.pin_memory
    if group.size == 1:
        return Collectives(device, name, group, pin_memory=pin_memory)
    if device.type == "cpu" and zero.shared_memory and on_one_machine(group):
        return SharedMemoryCollectives(name, group)
    deterministic = zero.reduction == "deterministic"
    return GroupCollectives(
        device,
        name,
        group,
        deterministic=deterministic,
        pin_memory=pin_memory,
        narrow=torch.bfloat16 if zero.reduce_dtype == "bf16" else None,
    )


def _unique(name: str, group: Group) -> str:
    given = group.gather_objects((name, _TAKEN[name] + 1))
    for other, (theirs, _) in zip(group.ranks, given, strict=True):
        if theirs != given[0][0]:
            raise DesyncError(
                f"rank {group.ranks[0]} builds the engine {given[0][0]!r} while rank {other} builds"
                f" {theirs!r}; {SAME_ORDER}"
            )
    _TAKEN[name] = number = max(count for _, count in given)
    return name if number == 1 else f"{name} {number}"
