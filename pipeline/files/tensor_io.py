"""Bytes of tensors at positions of open files: no copies, and other threads run meanwhile."""

import os
from collections.abc import Sequence

import torch
from torch import Tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, as it is: writing to it changes the tensor."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def read_at(file: int, parts: Sequence[memoryview], position: int) -> None:
    """Fill `parts`, one after the other, from `position` of the open file on.

    Raises:
        EOFError: the file ends before.
        OSError: the system can't read.
    """
    left = _filled(parts)
    while left:
        count = os.preadv(file, left, position)
        if count == 0:
            raise EOFError(f"the file ends at byte {os.fstat(file).st_size}")
        position += count
        left = _after(left, count)


def write_at(file: int, parts: Sequence[memoryview], position: int) -> None:
    """Write `parts`, one after the other, from `position` of the open file on.

    Raises:
        OSError: the system can't write.
    """
    left = _filled(parts)
    while left:
        count = os.pwritev(file, left, position)
        position += count
        left = _after(left, count)


def _filled(parts: Sequence[memoryview]) -> list[memoryview]:
    return [part for part in parts if part.nbytes]


def _after(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `parts` after their first `count` bytes: a system call may do less."""
    for index, part in enumerate(parts):
        if count < part.nbytes:
            return [part[count:], *parts[index + 1 :]]
        count -= part.nbytes
    return []
