"""The device of a process, and transfers to and from it."""

from collections.abc import Sequence

import torch
from torch import Tensor


def local_device() -> torch.device:
    """Return the GPU of this process, or the CPU if there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def to_device(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Move a host tensor to `device`, by default this process's device.

    The host does not wait for a GPU's queue. The tensor may be changed immediately if it is copied,
    since the driver has finished reading pageable memory by the time the call returns.
    """
    return tensor.to(local_device() if device is None else device, non_blocking=True)


def read_scalars(scalars: Sequence[Tensor]) -> list[float]:
    """Return the exact values of scalars on one device, read with one copy.

    Reading waits for the device's queue, so loops over micro-batches collect detached values and
    read them after the last micro-batch.
    """
    if not scalars:
        return []
    return torch.stack([scalar.detach().double() for scalar in scalars]).tolist()
