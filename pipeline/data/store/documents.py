"""Documents of a token file, many at a time, in arrays."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.store.marks import Marks
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

    marks: Marks | None = None
    """Of dialogues."""

    def chosen(self, order: NDArray[np.int64]) -> "Documents":
        """The documents of these numbers, in this order."""
        ends = np.cumsum(self.lengths)
        lengths = self.lengths[order]
        shift = (ends - self.lengths)[order] - (np.cumsum(lengths) - lengths)
        places = np.arange(lengths.sum()) + np.repeat(shift, lengths)
        marks = self.marks and self.marks.chosen(places, order)
        return Documents(self.ids[places], lengths, marks)


def joined(parts: Sequence[Documents]) -> Documents:
    """All documents of the parts, of one kind, one part after the other."""
    marks = [each.marks for each in parts if each.marks is not None]
    return Documents(
        np.concatenate([each.ids for each in parts]),
        np.concatenate([each.lengths for each in parts]),
        Marks(
            np.concatenate([each.trained for each in marks]),
            np.concatenate([each.records for each in marks]),
        )
        if marks
        else None,
    )


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
        end = int(ends[-1])
        marks = None
        if file.has_marks:
            marks = Marks(file.trained(begin, end), file.records(first, last))
        yield first, Documents(file.slice(begin, end), lengths, marks)
        file.release()
        first = last
