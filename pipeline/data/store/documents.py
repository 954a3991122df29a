"""Documents of a token file, many at a time, in arrays."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.store.reader import TokenFile

PART = 2**20
"""Tokens that are in memory at a time, but for a longer document; and documents."""


@dataclass(frozen=True)
class Documents:
    """Some documents, one after the other."""

    ids: NDArray[Any]
    """The tokens of all, [tokens] of u16 or u32."""

    lengths: NDArray[np.int64]
    """[documents]"""

    def chosen(self, order: NDArray[np.int64]) -> "Documents":
        """Those of these numbers, in this order."""
        ends = np.cumsum(self.lengths)
        lengths = self.lengths[order]
        shift = (ends - self.lengths)[order] - (np.cumsum(lengths) - lengths)
        places = np.arange(lengths.sum()) + np.repeat(shift, lengths)
        return Documents(self.ids[places], lengths)


def parts_of(file: TokenFile) -> Iterator[tuple[int, Documents]]:
    """All documents of a file, with the number of the first of each part.

    Raises:
        DataError: a block is damaged.
    """
    first = 0
    while first < file.documents:
        begin, _ = file.span(first)
        last = min(max(first + 1, file.document_at(begin + PART)), first + PART, file.documents)
        ends = file.ends(first, last).astype(np.int64)
        lengths = np.diff(ends, prepend=begin)
        yield first, Documents(file.slice(begin, int(ends[-1])), lengths)
        file.release()
        first = last
