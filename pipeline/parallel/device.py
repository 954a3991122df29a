"""The device of a process, and transfers to and from it."""

from collections.abc import Sequence

import torch
from torch import Tensor


def local_device() -> torch.device:
    """The GPU of this process, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def to_device(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """A copy of a host tensor on `device`, by default this process's.

    The host does not wait for the device's queue; the tensor may be changed immediately, since the
    driver has read pageable memory when the call returns.
    """
    return tensor.to(local_device() if device is None else device, non_blocking=True)


def read_scalars(scalars: Sequence[Tensor]) -> list[float]:
    """The exact values of scalars on one device, read with one copy.

    Reading waits for the device's queue, so loops over micro-batches collect detached values and
    read them after the last micro-batch.
    """
    if not scalars:
        return []
    return torch.stack([scalar.detach().double() for scalar in scalars]).tolist()
