"""Cases of storing keys and values: inputs and expected results."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.kernels.cache_append import MACROS, append_, reference_append
from pipeline.kernels.gpu import Gpu, Macros

BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    """Shapes of one call."""

    dtype: torch.dtype
    heads: int
    sizes: tuple[int, int]
    """Head sizes of a key and of a value."""

    tokens: int
    schedule: int = 0

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}-{self.heads}x{self.sizes}-{self.tokens}-order{self.schedule}"


@dataclass(frozen=True)
class Inputs:
    """A cache of three slots, new keys and values in a model's layout, and their positions."""

    cache: tuple[Tensor, Tensor]
    states: tuple[Tensor, Tensor]
    slot_mapping: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors."""
        return (*self.cache, *self.states, self.slot_mapping)


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Return tensors of these shapes; some positions are in no slot."""
    generator = torch.Generator().manual_seed(case.tokens)
    slots, width = 3, case.tokens + 5

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype).to(device)

    cache = tuple(numbers(slots, case.heads, width, size) for size in case.sizes)
    # Keys in the layout of a projection, values in that of a rotation.
    key = numbers(case.tokens, case.heads, case.sizes[0]).transpose(0, 1)
    value = numbers(case.heads, case.tokens, case.sizes[1])
    slot_mapping = torch.randperm(slots * width, generator=generator)[: case.tokens]
    slot_mapping[1:3] = torch.tensor([-1, slots * width])[: len(slot_mapping[1:3])]  # in no slot
    return Inputs((cache[0], cache[1]), (key, value), slot_mapping.to(device))


def run(case: Case, inputs: Inputs, gpu: Gpu) -> tuple[Tensor, Tensor]:
    """Run the kernel and return the cache."""
    del case
    append_(inputs.cache, inputs.states, inputs.slot_mapping, gpu=gpu)
    return inputs.cache


def is_correct(case: Case, inputs: Inputs, out: Sequence[Tensor]) -> bool:
    """Return whether the bits are those of the definition."""
    del case
    expected = (inputs.cache[0].clone(), inputs.cache[1].clone())
    reference_append(expected, inputs.states, inputs.slot_mapping)
    return all(map(torch.equal, out, expected))


QUICK = [
    Case(BF16, 8, (128, 128), 5, schedule=0),
    Case(BF16, 1, (64, 64), 1, schedule=1),
    Case(F32, 3, (80, 96), 33, schedule=7),
    Case(torch.float16, 40, (8, 256), 4, schedule=1),
]
GRID = QUICK

SPECIALIZATIONS: list[Macros] = [MACROS]
