"""Reading numbers from a device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def read_scalars(scalars: Sequence[Tensor]) -> list[float]:
    """The values of scalars of one device, exactly, with one copy.

    Reading one waits for all that the device has yet to do, so loops over micro-batches collect
    what they log, detached, and read it after the last.
    """
    if not scalars:
        return []
    return torch.stack([each.detach().double() for each in scalars]).tolist()
