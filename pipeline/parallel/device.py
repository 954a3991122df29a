"""The device that a process computes on."""

import torch


def local_device() -> torch.device:
    """The GPU of this process, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
