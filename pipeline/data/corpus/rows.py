"""The rows of a token file: windows of its tokens, or whole documents."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.data.store.reader import TokenFile

EVERY = 1024
"""Documents between two of which it is kept how many pieces come before."""


@dataclass(frozen=True)
class Span:
    """Tokens of one document."""

    document: int
    start: int
    """The first of them among all tokens of the file."""

    end: int
    is_first: bool
    """Whether the document begins here."""


@dataclass(frozen=True)
class TokenRow:
    """Spans that are learned together, each a sequence that sees itself alone."""

    file: TokenFile
    spans: tuple[Span, ...]

    bos: int | None
    """The token in front of each document's beginning; None of models that have none."""

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(
            each.end - each.start + (each.is_first and self.bos is not None) for each in self.spans
        )

    def __len__(self) -> int:
        return sum(self.lengths)

    @property
    def num_targets(self) -> int:
        """Tokens the loss counts: all but the first of each sequence, predicted from nothing."""
        return sum(length - 1 for length in self.lengths)

    def without(self, is_held_out: Callable[[TokenFile, int], bool]) -> "TokenRow":
        """Without the spans of documents that are held out."""
        kept = [each for each in self.spans if not is_held_out(self.file, each.document)]
        return TokenRow(self.file, tuple(kept), self.bos)

    def sequences(self) -> Iterator[NDArray[Any]]:
        """The tokens of each span, [tokens] of u16 or u32.

        Raises:
            DataError: a block that they lie in is damaged.
        """
        for span in self.spans:
            ids = self.file.slice(span.start, span.end)
            begins = span.is_first and self.bos is not None
            yield np.concatenate([np.array([self.bos], ids.dtype), ids]) if begins else ids


class FileRows(ABC):
    """The rows of a token file, of at most `max_length` tokens of each document."""

    def __init__(self, file: TokenFile, max_length: int, bos: int | None) -> None:
        self.file, self.bos = file, bos
        self.most = max_length - (bos is not None)
        """Tokens of the file in a sequence: no sequence is longer than `max_length`."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, row: int) -> TokenRow:
        """A row, with the documents that are held out.

        Raises:
            DataError: a block of the file is damaged.
        """


class Windows(FileRows):
    """Stretches of the file that follow one another, the last perhaps a shorter one."""

    def __len__(self) -> int:
        return (self.file.layout.tokens + self.most - 1) // self.most

    def __getitem__(self, row: int) -> TokenRow:
        start = self.most * row
        end = min(start + self.most, self.file.layout.tokens)
        spans: list[Span] = []
        document = self.file.document_at(start)
        while start < end:
            first, last = self.file.span(document)
            spans.append(Span(document, start, min(last, end), first == start))
            start, document = last, document + 1
        return TokenRow(self.file, tuple(spans), self.bos)


class Documents(FileRows):
    """A document each; of those longer than a row pieces that follow one another."""

    def __init__(self, file: TokenFile, max_length: int, bos: int | None) -> None:
        super().__init__(file, max_length, bos)
        before = [0]
        for start in range(0, file.documents, EVERY):
            before.append(before[-1] + int(self._pieces(start).sum()))
            file.release()
        self._before = np.array(before)
        """Pieces of the documents before every `EVERY`th one."""

    def __len__(self) -> int:
        return int(self._before[-1])

    def __getitem__(self, row: int) -> TokenRow:
        group = int(np.searchsorted(self._before, row, side="right")) - 1
        before = np.cumsum(self._pieces(group * EVERY)) + int(self._before[group])
        offset = int(np.searchsorted(before, row, side="right"))
        document = group * EVERY + offset
        first, last = self.file.span(document)
        piece = row - (int(before[offset - 1]) if offset else int(self._before[group]))
        start = first + piece * self.most
        span = Span(document, start, min(start + self.most, last), piece == 0)
        return TokenRow(self.file, (span,), self.bos)

    def _pieces(self, start: int) -> NDArray[np.int64]:
        """How many rows each of `EVERY` documents from `start` on has."""
        ends = self.file.ends(start, min(start + EVERY, self.file.documents)).astype(np.int64)
        return -(-np.diff(ends, prepend=self.file.span(start)[0]) // self.most)


ROWS: dict[Literal["windows", "documents"], type[FileRows]] = {
    "windows": Windows,
    "documents": Documents,
}
"""By the setting `packing`."""
