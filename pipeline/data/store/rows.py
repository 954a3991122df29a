"""Rows of a token file: windows of consecutive documents, or single documents."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.data.store.token_file import TokenFile

EVERY = 1024
"""Interval of documents at which the number of preceding rows is stored."""


@dataclass(frozen=True)
class Span:
    """Tokens of one document."""

    document: int
    start: int
    """Position of the first token in the file."""

    end: int
    is_first: bool
    """Whether the document begins here."""


@dataclass(frozen=True)
class TokenRow:
    """Spans that are learned together, each a separate sequence."""

    file: TokenFile
    spans: tuple[Span, ...]

    bos: int | None
    """Token inserted before each document; None for models without one."""

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(
            span.end - span.start + (span.is_first and self.bos is not None) for span in self.spans
        )

    def __len__(self) -> int:
        return sum(self.lengths)

    @property
    def num_targets(self) -> int:
        """Tokens that the loss counts: all but the first of each sequence."""
        return sum(length - 1 for length in self.lengths)

    def without(self, is_held_out: Callable[[TokenFile, int], bool]) -> "TokenRow":
        """The row without spans of held-out documents."""
        kept = [span for span in self.spans if not is_held_out(self.file, span.document)]
        return TokenRow(self.file, tuple(kept), self.bos)

    def sequences(self) -> Iterator[NDArray[Any]]:
        """Tokens of each span."""
        for span in self.spans:
            ids = self.file.slice(span.start, span.end)
            begins = span.is_first and self.bos is not None
            yield np.concatenate([np.array([self.bos], ids.dtype), ids]) if begins else ids


class FileRows(ABC):
    """Rows of a token file, with at most `max_length` tokens of each document."""

    def __init__(self, file: TokenFile, max_length: int, bos: int | None) -> None:
        self.file, self.bos = file, bos
        self.room = max_length - (bos is not None)
        """Tokens of the file in a row."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, row: int) -> TokenRow:
        """A row, including held-out documents."""

    def cut(self, documents: "Iterator[tuple[int, int, int]]") -> Iterator[TokenRow]:
        """Fill rows with stretches (document, start, end), cut where a row is full."""
        spans, room = list[Span](), self.room
        for document, begin, last in documents:
            start, first = begin, self.file.span(document)[0]
            while start < last:
                end = min(last, start + room)
                spans.append(Span(document, start, end, start == first))
                room -= end - start
                start = end
                if not room:
                    yield TokenRow(self.file, tuple(spans), self.bos)
                    spans, room = [], self.room
        if spans:
            yield TokenRow(self.file, tuple(spans), self.bos)


class Windows(FileRows):
    """Consecutive stretches of the file; the last may be shorter."""

    def __len__(self) -> int:
        return (len(self.file.ids) + self.room - 1) // self.room

    def __getitem__(self, row: int) -> TokenRow:
        start = self.room * row
        end = min(start + self.room, len(self.file.ids))

        def stretches() -> Iterator[tuple[int, int, int]]:
            position, document = start, self.file.document_at(start)
            while position < end:
                last = min(self.file.span(document)[1], end)
                yield document, position, last
                position, document = last, document + 1

        return next(self.cut(stretches()))


class Documents(FileRows):
    """One document per row; longer documents take several rows."""

    def __init__(self, file: TokenFile, max_length: int, bos: int | None) -> None:
        super().__init__(file, max_length, bos)
        before = [0]
        for start in range(0, file.documents, EVERY):
            before.append(before[-1] + int(self._rows_of(start).sum()))
            file.release()
        self._before = np.array(before)

    def __len__(self) -> int:
        return int(self._before[-1])

    def __getitem__(self, row: int) -> TokenRow:
        group = int(np.searchsorted(self._before, row, side="right")) - 1
        ends = np.cumsum(self._rows_of(group * EVERY)) + int(self._before[group])
        offset = int(np.searchsorted(ends, row, side="right"))
        document = group * EVERY + offset
        first, last = self.file.span(document)
        start = first + (row - int(ends[offset - 1] if offset else self._before[group])) * self.room
        span = Span(document, start, min(start + self.room, last), start == first)
        return TokenRow(self.file, (span,), self.bos)

    def _rows_of(self, start: int) -> NDArray[np.int64]:
        """Rows of each of `EVERY` documents from `start` on."""
        begins = self.file.begins(start, min(start + EVERY, self.file.documents) + 1)
        return -(-np.diff(begins) // self.room)


ROWS: dict[Literal["windows", "documents"], type[FileRows]] = {
    "windows": Windows,
    "documents": Documents,
}
"""By the setting `packing`."""
