"""LoRA adapters of which each row of a pass has its own, or none: rows of all run together.

The adapters of a layer lie side by side. All rows are multiplied by all of them, and what belongs
to another adapter than the row's is multiplied by 0:

    y = Wx + B (s * A x),    s = the row's adapter's scale in its own columns, 0 in the others

(Hu et al. 2021, 4.1; one adapter alone has the same sum without the zeros). So a pass has one shape
whoever is in it, is traced or captured like any other, and gives a row the bits that it has alone.
A pass without any adapter is the base's own.

Dimension names: N rows, K adapters, R columns of all adapters of a layer, I inputs, O outputs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

COLUMNS = 16
"""Columns are multiples of this: products of fewer outputs are added up in other ways."""


class LowRank(NamedTuple):
    """One adapter's change of a layer: B A, without its scale."""

    a: Float[Tensor, "r I"]
    b: Float[Tensor, "O r"]


class RowAdapters:
    """Which adapter each row of the pass at hand has."""

    def __init__(self, count: int) -> None:
        self.count = count
        """Adapters that there are; a row has one of 1 to `count`, or 0 for none."""
        self._numbers: Int[Tensor, " N"] | None = None
        self._scales: dict[int, Float[Tensor, "N R"]] = {}

    def begin(self, numbers: Int[Tensor, " N"] | None) -> None:
        """Say which adapters the rows of the next pass have; None has none in any of them."""
        self._numbers = numbers
        self._scales.clear()

    @property
    def any(self) -> bool:
        """Whether a row of the pass may have one."""
        return self._numbers is not None

    def scales(self, table: Float[Tensor, "K1 R"]) -> Float[Tensor, "N R"]:
        """The scales of each row's adapter; computed once in a pass for each table."""
        assert self._numbers is not None
        found = self._scales.get(id(table))
        if found is None:
            found = self._scales[id(table)] = table.index_select(0, self._numbers)
        return found


class AdaptedLayer(nn.Module):
    """A linear layer, and the adapters that rows of its input have.

    Args:
        base: the layer.
        parts: its adapters; those that don't change this layer have none here.
        rows: which of them the rows of a pass have.
        table: see `scale_table`; layers with equal ones share it.
    """

    def __init__(
        self,
        base: nn.Module,
        parts: Sequence[LowRank],
        rows: RowAdapters,
        table: Float[Tensor, "K1 R"],
    ) -> None:
        super().__init__()
        self.base = base
        self._rows = rows
        self.table: Float[Tensor, "K1 R"]
        self.a: Float[Tensor, "R I"]
        self.b: Float[Tensor, "R O"]
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("a", self._beside([each.a for each in parts]), persistent=False)
        # As (R, O), of which the columns of an adapter are a view.
        self.register_buffer("b", self._beside([each.b.T for each in parts]), persistent=False)

    def _beside(self, rows: Sequence[Float[Tensor, "_ _"]]) -> Float[Tensor, "R _"]:
        """The rows below one another, filled up with zeros to the table's width."""
        missing = self.table.shape[1] - sum(map(len, rows))
        return torch.cat([*rows, rows[0].new_zeros(missing, rows[0].shape[1])])

    def parts(self, ranks: Sequence[int]) -> list[LowRank]:
        """The adapters of these ranks, in the memory of this layer."""
        a, b = (each[: sum(ranks)].split(list(ranks)) for each in (self.a, self.b))
        return [LowRank(one, other.T) for one, other in zip(a, b, strict=True)]

    @property
    def weight(self) -> Tensor:
        """The base layer's weight: a model may ask for its format."""
        return self.base.weight  # pyright: ignore[reportReturnType]

    def forward(self, x: Float[Tensor, "*B N I"]) -> Float[Tensor, "*B N O"]:
        """The layer's result, with that of each row's adapter in fp32 added to it."""
        y = self.base(x)
        if not self._rows.any:
            return y
        within = F.linear(x.to(self.a.dtype), self.a) * self._rows.scales(self.table)
        return (y + F.linear(within, self.b.T)).to(y.dtype)


def scale_table(parts: Sequence[tuple[int, int, float]], count: int) -> Float[Tensor, "K1 R"]:
    """The scale of each adapter (a row; row 0 is none) in each column.

    Args:
        parts: number, rank and scale of each adapter of a layer, in the order of its columns.
        count: adapters that there are.
    """
    columns = sum(rank for _, rank, _ in parts)
    table = torch.zeros(count + 1, -(-columns // COLUMNS) * COLUMNS)
    first = 0
    for number, rank, scale in parts:
        table[number, first : first + rank] = scale
        first += rank
    return table
