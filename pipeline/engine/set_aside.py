"""Parameters that an update of their vector leaves as they are, or that are updated by themselves.

A plain loop leaves a parameter that has no gradient in a step: itself, its moments, and the number
of its updates, on which bias corrections depend. In a flat vector it lies among others. What is
left out of an update is taken out of the vector before, and put back after it; a parameter whose
number of updates is no longer that of the others is updated where it lies aside. Vectors that are
set aside have a length at which every kernel rounds all elements alike (`layout.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.engine.layout import ALIGNMENT

Numbers = Mapping[str, Tensor]
"""What an optimizer keeps for a whole tensor, by its own names: its step, mostly."""


@dataclass
class SetAside:
    """The elements of one parameter that this process updates; there may be none."""

    name: str
    place: slice
    """Where they lie in the vector."""

    master: Float[Tensor, " k"]
    moments: dict[str, Float[Tensor, " k"]]
    """Without those of a parameter that was never updated."""

    gradient: Float[Tensor, " k"] | None
    """None where it is left as it is."""

    numbers: Numbers | None
    """None where it was never updated."""

    @property
    def numel(self) -> int:
        """Elements, those not counted that fill the vectors up."""
        return self.place.stop - self.place.start


def filled_up(values: Float[Tensor, " n"]) -> Float[Tensor, " k"]:
    """A copy with zeros behind it, up to a length at which all elements are rounded alike."""
    size = -(-max(values.numel(), 1) // ALIGNMENT) * ALIGNMENT
    copy = torch.zeros(size, dtype=values.dtype, device=values.device)
    copy[: values.numel()] = values
    return copy


def same(one: Numbers | None, other: Numbers | None) -> bool:
    """Whether an optimizer has the same numbers for two parameters."""
    if one is None or other is None:
        return one is other
    return {k: v.item() for k, v in one.items()} == {k: v.item() for k, v in other.items()}
