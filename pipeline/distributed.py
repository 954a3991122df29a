"""Thin layer over torch.distributed: every function also works in a single process."""

import os
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.position import HERE, SAME_ORDER, DesyncError

T = TypeVar("T")


def rank() -> int:
    """Index of this process among all."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def local_world_size() -> int:
    """Number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


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
        HERE.come_to("barrier")
        with HERE.waiting():
            dist.barrier()


def global_sums(values: Sequence[int | float]) -> list[float]:
    """Element-wise sum over all processes, in float64, by one collective that all of them call."""
    if not dist.is_initialized():
        return [float(value) for value in values]
    total = torch.tensor(values, dtype=torch.float64, device=local_device())
    _all_reduce(total)
    return total.tolist()


def global_sum(value: int | float) -> float:
    """Sum of `value` over all processes."""
    return global_sums([value])[0]


def global_maxima(values: Sequence[int | float]) -> list[float]:
    """Element-wise largest of all processes, by one collective that all of them call."""
    if not dist.is_initialized():
        return [float(value) for value in values]
    largest = torch.tensor(values, dtype=torch.float64, device=local_device())
    _all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.tolist()


def global_max(value: int | float) -> float:
    """Largest `value` of all processes."""
    return global_maxima([value])[0]


def gather_objects(value: T) -> list[T]:
    """The values of all processes, in rank order, on every process.

    For small things: they travel as Python objects between processes that trust each other.
    """
    if not dist.is_initialized():
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    HERE.come_to("all_gather", "objects")
    with HERE.waiting():
        dist.all_gather_object(values, value)
    return values  # pyright: ignore[reportReturnType]  # every entry was filled


def _all_reduce(values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    HERE.come_to("all_reduce", "a few numbers", values.nbytes)
    packed = with_fingerprints(values)
    with HERE.waiting():
        dist.all_reduce(packed, op=op)
    values.copy_(without_fingerprints(packed))


def with_fingerprints(values: Tensor) -> Tensor:
    """A few float64 values, to be summed over processes, and beside them what each has done.

    Of the fingerprints each is zero but on one process: their sum is exact, as is their maximum.
    """
    done = values.new_zeros(world_size())
    done[rank()] = HERE.fingerprint
    return torch.cat([values, done])


def without_fingerprints(packed: Tensor) -> Tensor:
    """The values that were reduced.

    Raises:
        DesyncError: the processes have not come to the same collectives.
    """
    values, done = packed.split([packed.numel() - world_size(), world_size()])
    if done.unique().numel() > 1:
        raise DesyncError(_first_difference())
    return values


def _first_difference() -> str:
    """What two processes did while the others did something else; all call it, being in step."""
    histories = gather_objects({each.number: str(each) for each in HERE.history()})
    own = histories[rank()]
    for number in sorted(own):
        for other, theirs in enumerate(histories):
            if number in theirs and theirs[number] != own[number]:
                return (
                    f"rank {rank()} was at {own[number]} while rank {other} was at"
                    f" {theirs[number]}; {SAME_ORDER}"
                )
    return f"the processes ran different layers; {SAME_ORDER}"


def share_of_rank(items: Sequence[T]) -> list[T]:
    """Every world_size-th item, starting with this process's rank."""
    return list(items[rank() :: world_size()])
