"""Rows of token files: windows of consecutive documents, mixed and shuffled."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.batches import RowStream
from pipeline.data.store.token_file import TokenFile


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one document."""

    document: int
    start: int
    """Position of the first token in the file."""

    end: int
    is_first: bool
    """Whether the document begins here, with bos if there is one."""


@dataclass(frozen=True)
class TokenRow:
    """Spans of one training row, each a separate sequence."""

    file: TokenFile
    spans: tuple[Span, ...]

    bos: int | None
    """Token inserted before each document; None for models without one."""

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens in each sequence."""
        return tuple(
            span.end - span.start + (span.is_first and self.bos is not None) for span in self.spans
        )

    def __len__(self) -> int:
        return sum(self.lengths)

    @property
    def num_targets(self) -> int:
        """Number of tokens in the loss: all but the first of each sequence."""
        return sum(length - 1 for length in self.lengths)

    def without(self, is_held_out: Callable[[TokenFile, int], bool]) -> "TokenRow":
        """Return the row without spans of held-out documents."""
        spans = (span for span in self.spans if not is_held_out(self.file, span.document))
        return TokenRow(self.file, tuple(spans), self.bos)

    def sequences(self) -> Iterator[NDArray[Any]]:
        """Yield the tokens of each sequence."""
        for span in self.spans:
            ids = self.file.slice(span.start, span.end)
            has_bos = span.is_first and self.bos is not None
            yield np.concatenate([np.array([self.bos], ids.dtype), ids]) if has_bos else ids


class Windows:
    """Rows of `max_length` consecutive tokens of a file; the last may be shorter.

    The token `bos` is inserted before each document, unless it would be the last of a row.
    """

    def __init__(self, file: TokenFile, max_length: int, bos: int | None) -> None:
        self.file, self.max_length, self.bos = file, max_length, bos
        self._num_bos = int(bos is not None)
        num_before = np.insert(np.cumsum(np.diff(file.starts) > 0), 0, 0)
        self._starts = file.starts + self._num_bos * num_before
        """Positions of the documents among all tokens, including bos."""

    def __len__(self) -> int:
        return math.ceil(self._starts[-1] / self.max_length)

    def __getitem__(self, row: int) -> TokenRow:
        """Return a row, including held-out documents."""
        position = self.max_length * row
        end = min(position + self.max_length, int(self._starts[-1]))
        spans: list[Span] = []
        document = int(np.searchsorted(self._starts, position, side="right")) - 1
        while position < end:
            document_end = min(int(self._starts[document + 1]), end)
            spans += self._cut(document, position, document_end)
            position, document = document_end, document + 1
        return TokenRow(self.file, tuple(spans), self.bos)

    def fill_with(self, documents: Sequence[int]) -> Iterator[TokenRow]:
        """Yield rows filled with these documents alone, split at row boundaries."""
        spans, capacity = list[Span](), self.max_length
        for document in documents:
            start, document_end = self._starts[document : document + 2].tolist()
            while start < document_end:
                end = min(document_end, start + capacity)
                spans += self._cut(document, start, end)
                capacity, start = capacity - (end - start), end
                if not capacity:
                    yield TokenRow(self.file, tuple(spans), self.bos)
                    spans, capacity = [], self.max_length
        if spans:
            yield TokenRow(self.file, tuple(spans), self.bos)

    def _cut(self, document: int, start: int, end: int) -> list[Span]:
        """Return a document's tokens at positions [`start`, `end`), or [] if there is only bos."""
        document_start = int(self._starts[document])
        first = max(start, document_start + self._num_bos)
        offset = int(self.file.starts[document]) - document_start - self._num_bos
        is_first = start == document_start
        return [Span(document, first + offset, end + offset, is_first)] if first < end else []


class MixedStream:
    """An endless stream of rows from several files in global batches, the same on every process.

    The next row is from the file that is furthest behind its share (Webster's method), so that any
    range of rows follows the mixture. Each file's rows are reshuffled whenever all have been used.
    `sizes` and `weights` are the number of rows and the relative weight of each file.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], *, batch_size: int, seed: int
    ) -> None:
        self.weights, self.batch_size = weights, batch_size
        self._streams = [
            RowStream(num_rows=size, batch_size=1, seed=seed + 7919 * file)
            for file, size in enumerate(sizes)
        ]

    @property
    def num_rows(self) -> int:
        """Number of rows of the mixture after which all rows of one file have been used."""
        streams = zip(self._streams, self.weights, strict=True)
        rows_per_weight = min(stream.num_rows / weight for stream, weight in streams)
        return max(1, round(rows_per_weight * sum(self.weights)))

    def num_steps(self, epochs: float, max_steps: int | None) -> int:
        """Return `max_steps`, or the number of steps for `epochs` times `num_rows` rows."""
        return max_steps or math.ceil(epochs * self.num_rows / self.batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self

    def __next__(self) -> list[tuple[int, int]]:
        """Return the (file, row) pairs of a global batch."""
        return [self._next_row() for _ in range(self.batch_size)]

    def _next_row(self) -> tuple[int, int]:
        streams = zip(self._streams, self.weights, strict=True)
        progress = [(stream.position + 0.5) / weight for stream, weight in streams]
        file = progress.index(min(progress))
        return file, self._streams[file].next_rows(1)[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rows used from each file so far, over all passes."""
        return {"taken": [stream.position for stream in self._streams]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the `state_dict` of another stream of the same files, weights and seed."""
        for stream, position in zip(self._streams, state["taken"], strict=True):
            stream.position = position
