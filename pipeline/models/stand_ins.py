"""What stands in a stage of a pipeline for modules of other stages, and of other chunks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Passed(nn.Module):
    """In the place of a block of another stage: hands on the hidden states it is given."""

    def __init__(self, block: nn.Module, *, as_tuple: bool) -> None:
        super().__init__()
        self.as_tuple = as_tuple
        for name, value in vars(block).items():  # which some models ask their blocks for
            if isinstance(value, str | int | float) and name not in vars(self):
                setattr(self, name, value)

    def forward(self, *args: object, **kwargs: object) -> Tensor | tuple[Tensor]:
        """What a block returns: hidden states."""
        hidden = self.hidden(cast("Tensor", args[0] if args else kwargs["hidden_states"]))
        return (hidden,) if self.as_tuple else hidden

    def hidden(self, given: Tensor) -> Tensor:
        """The hidden states to hand on."""
        return given


class Inlet(Passed):
    """In the place of the first block, on a later stage: where hidden states come in."""

    received: Float[Tensor, "1 N d"] | None = None
    """Hidden states of the next pass, from the stage before."""

    def hidden(self, given: Tensor) -> Tensor:
        """Those that were received; noise where the model is but tried, with whatever states."""
        received, self.received = self.received, None
        if received is not None:
            return received
        if given.is_meta:
            return torch.empty_like(given, requires_grad=torch.is_grad_enabled())
        generator = torch.Generator().manual_seed(0)
        return torch.randn(given.shape, generator=generator).to(given)


class Absent(nn.Module):
    """In the place of an embedding or a projection of the first stage: zeros."""

    def __init__(self, module: nn.Module, *, of_tokens: bool) -> None:
        super().__init__()
        is_table = isinstance(module, nn.Embedding)
        self.width = module.embedding_dim if is_table else cast("int", module.out_features)
        self.whole = of_tokens or not is_table
        """Whether it is as long as its input, and not to be broadcast."""
        self.dtype = cast("Tensor", module.weight).dtype

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """Zeros in the shape of its output."""
        given = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        like = given if given.dtype.is_floating_point is False else given[..., 0]
        shape = like.shape if self.whole else (1,) * like.ndim
        return torch.zeros(*shape, self.width, dtype=self.dtype, device=given.device)


class Place(NamedTuple):
    """A module of a stage, and what stands for it while another chunk is at work."""

    parent: nn.Module
    name: str
    own: nn.Module
    other: nn.Module


@dataclass(frozen=True)
class Chunk:
    """Blocks that follow each other, between two transfers of hidden states."""

    number: int = 0
    """Among those of all stages, in the model's order."""

    count: int = 1

    inlet: Inlet | None = None
    """Where hidden states come in; None where tokens are read."""

    places: tuple[Place, ...] = ()
    """Where the modules of the stage's other chunks belong."""

    @property
    def is_first(self) -> bool:
        """Whether it reads tokens."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the head."""
        return self.number == self.count - 1

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Leave this chunk alone in the stage's model, for a pass forward or back."""
        for place in self.places:
            setattr(place.parent, place.name, place.other)
        try:
            yield
        finally:
            for place in self.places:
                setattr(place.parent, place.name, place.own)
