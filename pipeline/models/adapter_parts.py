"""What the parts of a divided layer are to its adapter: those of processes, or virtual ones.

A product with all columns of a half is rounded otherwise than one with a part's. So that a weight
is merged to the same bits whoever has how many virtual parts, each part's elements are computed by
themselves, as in training (`part_by_part.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from jaxtyping import Float
from peft.tuners.lora import LoraLayer
from torch import Tensor

from pipeline.models.layer_variant import is_turned
from pipeline.parallel.shards import ShardSpec
from pipeline.parallel.virtual_parts import VirtualParts

_PARTS = "adapter_parts"
"""Attribute in which an adapted layer has its parts."""


@dataclass(frozen=True)
class AdapterParts:
    """The parts of an adapted layer, each of which has some rows or columns of its weight."""

    parts: VirtualParts

    pieces: Sequence[ShardSpec]
    """Where those of each part of this process lie in the weight (out, in) that it has."""

    @property
    def are_columns(self) -> bool:
        """Whether the layer is divided by its inputs."""
        return self.pieces[0].dim == 1

    def halves(
        self, down: Float[Tensor, "rank in"], up: Float[Tensor, "out rank"]
    ) -> Iterator[tuple[ShardSpec, Tensor, Tensor]]:
        """Each part's piece of the weight, with its halves A and B as a process has them."""
        for piece in self.pieces:
            if self.are_columns:
                yield piece, piece.of(down).contiguous(), up
            else:
                yield piece, down, piece.of(up).contiguous()

    def product(
        self, down: Float[Tensor, "rank in"], up: Float[Tensor, "out rank"]
    ) -> Float[Tensor, "out in"]:
        """B A, part by part."""
        found = up.new_empty(len(up), down.shape[1])
        for piece, own_down, own_up in self.halves(down, up):
            piece.put(own_up @ own_down, found)
        return found


def divide_adapter(layer: LoraLayer, parts: VirtualParts, pieces: Sequence[ShardSpec]) -> None:
    """Say which parts a layer has, and where this process's lie in its weight (out, in)."""
    setattr(layer, _PARTS, AdapterParts(parts, tuple(pieces)))


def parts_of_adapter(layer: LoraLayer) -> AdapterParts | None:
    """The parts of a layer; None of one that is whole, or whose parts are only its processes'."""
    return getattr(layer, _PARTS, None)


def product_of(
    layer: LoraLayer, down: Float[Tensor, "rank in"], up: Float[Tensor, "out rank"]
) -> Float[Tensor, "out in"]:
    """B A of a layer's halves, as its parts compute it."""
    parts = parts_of_adapter(layer)
    return up @ down if parts is None else parts.product(down, up)


def update_of(layer: LoraLayer) -> Float[Tensor, "*S"]:
    """What a plain adapter adds to its layer's weight, s B A, as the layer stores weights."""
    if parts_of_adapter(layer) is None:  # also of a table, whose halves peft has elsewhere
        return layer.get_delta_weight("default")  # pyright: ignore[reportAttributeAccessIssue]
    down, up = halves_of(layer)
    update = product_of(layer, down, up) * layer.scaling["default"]
    return update.T if is_turned(layer) else update


def halves_of(layer: LoraLayer) -> tuple[Float[Tensor, "rank in"], Float[Tensor, "out rank"]]:
    """A and B."""
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    return cast("Tensor", down), cast("Tensor", up)
