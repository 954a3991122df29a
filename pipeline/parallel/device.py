"""The device of a process, and transfers to and from it."""

from collections.abc import Sequence

import torch
from torch import Tensor


def local_device() -> torch.device:
    """The GPU of this process, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def send(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """A tensor of the host on `device`, by default this process's.

    The host does not wait for earlier work of the device; the tensor may change at once, since the
    driver has read pageable memory before the call returns.
    """
    return tensor.to(local_device() if device is None else device, non_blocking=True)


def read_scalars(scalars: Sequence[Tensor]) -> list[float]:
    """The values of scalars of one device, exactly, with one copy.

    Reading one waits for all that the device has yet to do, so loops over micro-batches collect
    what they log, detached, and read it after the last.
    """
    if not scalars:
        return []
    return torch.stack([each.detach().double() for each in scalars]).tolist()
