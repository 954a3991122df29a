"""Which elements of a flattened parameter the elements of a part of it are.

Each shard of a part is a block of columns: of each row of the whole parameter, flattened from the
dimension that is cut on, a run of elements from some place on. Its elements have numbers of their
own, row after row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from pipeline.engine.checkpoint.format import Columns, Fragment
from pipeline.engine.stored import READ_AT_ONCE
from pipeline.engine.tensor_parts import Part

ReadInto = Callable[[int, Tensor], None]
"""Fills a flat tensor with elements of a whole parameter from a place on."""


@dataclass(frozen=True)
class Block:
    """The elements of one shard among some consecutive elements of a part."""

    columns: Columns
    """The columns of the whole parameter that these elements lie in."""

    is_one_row: bool
    """Whether the whole parameter has no other rows, so that they are consecutive there."""

    first: int
    last: int
    """The shard's elements from `first` on and before `last`."""

    begin: int
    """Where the shard's run begins in a row of the part."""

    width: int
    """Elements of a row of the part."""

    offset: int
    """Number in the part of the first of the consecutive elements."""

    counts: bool
    """Whether no process of lower rank has them."""

    def places(self, first: int, last: int) -> Int[Tensor, " n"]:
        """Where elements of the shard lie among the consecutive ones."""
        number = torch.arange(first, last)
        run = self.columns.run
        return number // run * self.width + self.begin + number % run - self.offset

    @property
    def is_all(self) -> bool:
        """Whether they are all of the consecutive elements."""
        return self.columns.run == self.width


def blocks_of(part: Part, start: int, stop: int) -> Iterator[Block]:
    """The elements `start` to `stop` of a flattened part, shard by shard."""
    spec, inner = part.own, part.inner
    width, stride = spec.shape(part.whole)[spec.dim] * inner, part.whole[spec.dim] * inner
    one_row = part.whole[: spec.dim].numel() == 1
    for shard, begin in spec.placed():
        run, low = shard.size * inner, begin * inner

        def before(element: int, run: int = run, low: int = low) -> int:
            return element // width * run + min(max(element % width - low, 0), run)

        columns = Columns(shard.start * inner, run, stride)
        first, last = before(start), before(stop)
        if first < last:
            yield Block(columns, one_row, first, last, low, width, start, shard.counts)


def fragments_of(
    key: str, part: Part | None, start: int, values: Shaped[Tensor, " n"]
) -> Iterator[Fragment]:
    """Elements of a flattened `part` from `start` on, under their places in the whole parameter.

    Those that a process of lower rank has too are left to it.
    """
    if part is None:
        yield Fragment(key, start, values)
        return
    for block in blocks_of(part, start, start + values.numel()):
        if not block.counts:
            continue
        if block.is_all:
            own = values
        elif block.is_one_row:
            first = block.begin + block.first - start
            own = values[first : first + block.last - block.first]
        else:
            own = values[block.places(block.first, block.last).to(values.device)]
        if block.is_one_row:
            yield Fragment(key, block.columns.offset + block.first, own)
        else:
            yield Fragment(key, block.first, own, block.columns)


def read_part(part: Part | None, start: int, out: Shaped[Tensor, " n"], read: ReadInto) -> None:
    """Fill `out` with elements of a flattened `part` from `start` on.

    `read` knows those of the whole parameter. Where elements lie apart there, whole rows are read,
    a few at a time.
    """
    if part is None:
        read(start, out)
        return
    for block in blocks_of(part, start, start + out.numel()):
        if block.is_one_row:
            first = block.begin + block.first - start
            read(block.columns.offset + block.first, out[first : first + block.last - block.first])
        else:
            _read_rows(block, out, read)


def _read_rows(block: Block, out: Tensor, read: ReadInto) -> None:
    offset, run, stride = block.columns
    at_once = max(1, READ_AT_ONCE // stride)
    for row in range(block.first // run, (block.last - 1) // run + 1, at_once):
        rows = min(at_once, (block.last - 1) // run + 1 - row)
        whole = torch.empty(rows * stride, dtype=out.dtype)
        read(row * stride, whole)
        own = whole.view(rows, stride)[:, offset : offset + run].reshape(-1)
        first, last = max(block.first, row * run), min(block.last, (row + rows) * run)
        own = own[first - row * run : last - row * run].to(out.device)
        if block.is_all:
            out[first - block.first : last - block.first] = own
        else:
            out[block.places(first, last).to(out.device)] = own
