"""What an operator's `bad_input.py` is made of: operators, and ways to spoil their input."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]
BF16, META = torch.bfloat16, torch.device("meta")


def odd(tensor: Tensor) -> Tensor:
    """The same numbers, one byte behind the place where such numbers belong."""
    memory = torch.zeros(tensor.nbytes + 64, dtype=torch.uint8)
    gap = 1 - memory.data_ptr() % tensor.itemsize
    moved = torch.frombuffer(
        memory.numpy(), dtype=tensor.dtype, offset=gap % 64, count=tensor.numel()
    )
    return moved.view(tensor.shape).copy_(tensor)


def shifted(tensor: Tensor) -> Tensor:
    """The same numbers, one element behind a multiple of 16 bytes."""
    memory = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].view(tensor.shape).copy_(tensor)


def strided(tensor: Tensor) -> Tensor:
    """The same numbers, every other one of memory."""
    return torch.stack([tensor, torch.full_like(tensor, 7)], dim=-1)[..., 0]


@dataclass(frozen=True)
class Operator:
    """One operator: good input, its call, its definition, and what is done to the input."""

    inputs: Callable[[], Inputs]
    call: Callable[[Inputs], Any]
    definition: Callable[[Inputs], Any]
    changes: Mapping[str, Callable[[Inputs], Inputs]]

    on_gpu: bool = True
    """Whether its tensors are taken for those of a GPU."""


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)
