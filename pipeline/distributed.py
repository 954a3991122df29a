"""Thin layer over torch.distributed: every function also works in a single process."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@contextmanager
def process_group(timeout_seconds: float = 1800) -> Iterator[None]:
    """Join the processes that torchrun started; does nothing where it started none.

    NCCL on GPUs, gloo on CPUs. A process that waits `timeout_seconds` for the others gives up.
    """
    if "RANK" not in os.environ or dist.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(seconds=timeout_seconds)
    )
    try:
        yield
        dist.barrier()  # gloo's threads abort where a process leaves while another still sends
    finally:
        dist.destroy_process_group()


def rank() -> int:
    """Index of this process among all."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """True on the process that writes files and prints."""
    return rank() == 0


def local_device() -> torch.device:
    """The GPU of this process, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def barrier() -> None:
    """Wait until every process is here."""
    if dist.is_initialized():
        dist.barrier()


def global_sums(values: Sequence[int | float]) -> list[float]:
    """Element-wise sum over all processes, in float64, by one collective that all of them call."""
    if not dist.is_initialized():
        return [float(value) for value in values]
    total = torch.tensor(values, dtype=torch.float64, device=local_device())
    dist.all_reduce(total)
    return total.tolist()


def global_sum(value: int | float) -> float:
    """Sum of `value` over all processes."""
    return global_sums([value])[0]


def global_max(value: int | float) -> float:
    """Largest `value` of all processes."""
    if not dist.is_initialized():
        return float(value)
    largest = torch.tensor(value, dtype=torch.float64, device=local_device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def gather_objects(value: T) -> list[T]:
    """The values of all processes, in rank order, on every process.

    For small things: they travel as Python objects between processes that trust each other.
    """
    if not dist.is_initialized():
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # pyright: ignore[reportReturnType]  # every entry was filled


def share_of_rank(items: Sequence[T]) -> list[T]:
    """Every world_size-th item, starting with this process's rank."""
    return list(items[rank() :: world_size()])
