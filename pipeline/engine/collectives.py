"""Which collectives the processes of an engine use."""

import torch

from pipeline.distributed import world_size
from pipeline.engine.comm import Collectives, GroupCollectives
from pipeline.engine.config import ZeroConfig
from pipeline.engine.shared_memory import SharedMemoryCollectives, on_one_machine


def make_collectives(device: torch.device, zero: ZeroConfig) -> Collectives:
    """The fastest collectives between the processes there are; all of them call it in step."""
    pin_memory = zero.offload.pin_memory
    if world_size() == 1:
        return Collectives(device, pin_memory=pin_memory)
    if device.type == "cpu" and zero.shared_memory and on_one_machine():
        return SharedMemoryCollectives()
    deterministic = zero.reduction == "deterministic"
    return GroupCollectives(device, deterministic=deterministic, pin_memory=pin_memory)
