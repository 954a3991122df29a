"""Parameters that an update of their vector leaves as they are, or that are updated by themselves.

A plain loop leaves a parameter that has no gradient in a step: itself, its moments, and the number
of its updates, on which bias corrections depend. In a flat vector it lies among others. What is
left out of an update is taken out of the vector before, and put back after it; a parameter whose
number of updates is no longer that of the others is updated where it lies aside. Vectors that are
set aside have a length at which every kernel rounds all elements alike (`layout.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from pipeline.config import OptimConfig
from pipeline.engine.optim import build_optimizer
from pipeline.kernels.adamw.definition import BLOCK, grain

Numbers = Mapping[str, Tensor]
"""What an optimizer keeps for a whole tensor, by its own names: its step, mostly."""


@dataclass
class SetAside:
    """The elements of one parameter that this process updates; there may be none."""

    name: str
    place: slice
    """Where they lie in the vector."""

    master: Float[Tensor, " k"]
    moments: dict[str, Shaped[Tensor, " _"]]
    """As they are kept, by their names; none of a parameter that was never updated."""

    gradient: Float[Tensor, " k"] | None
    """The gradient to put back; None where it is left as it is."""

    numbers: Numbers | None
    """What the optimizer keeps for the parameter as a whole; None where it was never updated."""

    @property
    def numel(self) -> int:
        """Elements, those not counted that fill the vectors up."""
        return self.place.stop - self.place.start


def filled_up(values: Shaped[Tensor, " n"], name: str = "") -> Shaped[Tensor, " k"]:
    """A copy with zeros behind it, up to a length at which all elements are rounded alike.

    It is one of whole blocks; of a vector with an entry for each block, by its `name`, an entry for
    each of them.
    """
    entries = BLOCK // grain(name)
    size = -(-max(values.numel(), 1) // entries) * entries
    copy = torch.zeros(size, dtype=values.dtype, device=values.device)
    copy[: values.numel()] = values
    return copy


def step_by_itself(each: SetAside, settings: Mapping[str, Any], optim: OptimConfig) -> None:
    """Update a parameter that has a gradient by a class of PyTorch.

    `settings` are those of the group of parameters in which it would be.
    """
    param = nn.Parameter(each.master)
    optimizer = build_optimizer([{**settings, "params": [param]}], optim)
    (own,) = optimizer.param_groups
    own.update({name: value for name, value in settings.items() if name != "params"})
    if each.numbers is not None:
        state = {0: {**each.moments, **each.numbers}}
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    param.grad = each.gradient
    optimizer.step()
    state = {k: v for k, v in optimizer.state[param].items() if isinstance(v, Tensor)}
    each.master = param.detach()
    each.moments = {kind: value for kind, value in state.items() if value.ndim}
    each.numbers = {name: value for name, value in state.items() if not value.ndim}


def same(one: Numbers | None, other: Numbers | None) -> bool:
    """Whether an optimizer has the same numbers for two parameters."""
    if one is None or other is None:
        return one is other
    return {k: v.item() for k, v in one.items()} == {k: v.item() for k, v in other.items()}
