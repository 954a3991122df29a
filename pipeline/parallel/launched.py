"""Ranks from torchrun's variables (default: one process), available before torch is imported."""

import os


def rank() -> int:
    """Return the global rank of this process."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Return the rank of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Return the number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
