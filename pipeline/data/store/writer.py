"""Writes a token file in order: `X.writing` until it is whole, then `X`.

Ends of documents wait in `X.ends`, and marks of dialogues in `X.trained` and `X.records`, so that
memory does not grow with their number.
"""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pipeline.data.store.layout import (
    BLOCK_BYTES,
    END_BYTES,
    HEADER_BYTES,
    RECORD_BYTES,
    Layout,
    Origin,
    encode_footer,
    encode_header,
)
from pipeline.data.store.marks import Marks
from pipeline.errors import DataError
from pipeline.files.durable import rename_durably

COPY_BYTES = 2**20


class _Column:
    """What is appended for each token or for each document, to a file of its own."""

    def __init__(self, path: Path, unit: int, *, begin: int = 0, mode: str) -> None:
        self.path, self.unit, self.begin = path, unit, begin
        self.file: BinaryIO = path.open(mode)  # pyright: ignore[reportAttributeAccessIssue]

    def place(self, count: int) -> int:
        """Where in the file the unit of that number begins."""
        return self.begin + self.unit * count

    def read(self, start: int, count: int) -> Iterator[bytes]:
        """The bytes of `count` units from `start` on, in parts, as far as they are there."""
        self.file.seek(self.place(start))
        left = self.unit * count
        while left and (part := self.file.read(min(COPY_BYTES, left))):
            left -= len(part)
            yield part

    def cut(self, count: int) -> None:
        """Keep that many units, and append after them."""
        self.file.truncate(self.place(count))
        self.file.seek(self.place(count))


class TokenWriter:
    """Tokens, ends of documents and marks, appended to files of their own; a context closes them.

    Args:
        path: of the token file.
        width: bytes of a token.
        marked: of dialogues: each document comes with marks.
        resume: go on with the files as they are; `keep` says how much of them counts.
    """

    def __init__(
        self, path: Path, width: int, *, marked: bool = False, resume: bool = False
    ) -> None:
        self.path, self.width, self.marked = path, width, marked
        self.writing = writing_path(path)
        mode = "r+b" if resume else "w+b"
        self._tokens = _Column(self.writing, width, begin=HEADER_BYTES, mode=mode)
        self._ends = _Column(ends_path(path), END_BYTES, mode=mode)
        self._of_tokens, self._of_documents = [self._tokens], [self._ends]
        if marked:
            # A byte for each token until the end: so pieces of any length follow one another.
            self._trained = _Column(_beside(path, "trained"), 1, mode=mode)
            self._records = _Column(_beside(path, "records"), RECORD_BYTES, mode=mode)
            self._of_tokens.append(self._trained)
            self._of_documents.append(self._records)
        self.tokens = self.documents = 0
        if not resume:
            self.drop_rest()

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def append(
        self, ids: NDArray[Any], lengths: NDArray[Any], marks: Marks | None = None
    ) -> list[memoryview]:
        """Add documents.

        Args:
            ids: the tokens of all, [tokens], each below the vocabulary's size.
            lengths: how many of them each document has, [documents]; their sum is `tokens`.
            marks: of dialogues.

        Returns:
            The bytes that were appended, file by file in the order of `read_back`.
        """
        assert (marks is not None) == self.marked
        ends = (self.tokens + np.cumsum(lengths, dtype=np.uint64)).astype("<u8")
        written = [np.ascontiguousarray(ids, dtype=f"<u{self.width}").view(np.uint8)]
        if marks is not None:
            written.append(marks.trained.view(np.uint8))
        written.append(ends.view(np.uint8))
        if marks is not None:
            written.append(np.ascontiguousarray(marks.records).view(np.uint8))
        for column, content in zip(self._columns, written, strict=True):
            column.file.write(content.data)
        self.tokens += len(ids)
        self.documents += len(lengths)
        return [content.data for content in written]

    @property
    def _columns(self) -> list[_Column]:
        return [*self._of_tokens, *self._of_documents]

    def discard(self) -> None:
        """Close and remove the files."""
        self.close()
        for column in self._columns:
            column.path.unlink(missing_ok=True)

    def flush(self) -> None:
        """Hand all to the system: from now on it outlives this process."""
        for column in self._columns:
            column.file.flush()

    def read_back(self, tokens: int, documents: int) -> Iterator[bytes]:
        """What was appended for the next `tokens` and `documents`, of a file that is resumed.

        The caller compares it with its checksum, and then calls `keep`.
        """
        for column in self._of_tokens:
            yield from column.read(self.tokens, tokens)
        for column in self._of_documents:
            yield from column.read(self.documents, documents)

    def keep(self, tokens: int, documents: int) -> None:
        """Take the next `tokens` and `documents` of a file that is resumed as appended."""
        self.tokens += tokens
        self.documents += documents

    def drop_rest(self) -> None:
        """Cut off what was not kept."""
        for column in self._of_tokens:
            column.cut(self.tokens)
        for column in self._of_documents:
            column.cut(self.documents)

    def finish(self, origin: Origin) -> Layout:
        """Write ends, marks, CRCs, header and footer, and give the file its name, for good.

        Raises:
            DataError: the files have not the size that the appended tokens and documents take.
        """
        layout = Layout(self.width, self.tokens, self.documents, self.marked)
        self.flush()
        self._check_sizes()
        file = self._tokens.file
        file.seek(layout.ends_begin)
        for column in self._of_documents:
            for part in column.read(0, self.documents):
                file.write(part)
        if self.marked:
            # Parts have a multiple of eight tokens, but for the last.
            for part in self._trained.read(0, self.tokens):
                file.write(np.packbits(np.frombuffer(part, np.uint8), bitorder="little").data)
        file.truncate(layout.crcs_begin)
        crcs = self._block_crcs(layout)
        file.seek(layout.crcs_begin)
        file.write(crcs + encode_footer(layout, crcs))
        file.seek(0)
        file.write(encode_header(layout, origin))
        file.flush()
        os.fsync(file.fileno())
        self.close()
        rename_durably(self.writing, self.path)
        for column in self._columns[1:]:
            column.path.unlink()
        return layout

    def _check_sizes(self) -> None:
        counts = {id(column): self.tokens for column in self._of_tokens}
        for column in self._columns:
            count = counts.get(id(column), self.documents)
            if column.path.stat().st_size != column.place(count):
                raise DataError(
                    f"{column.path} has not the size of what was written: another program changed"
                    " it; remove it and pack again"
                )

    def close(self) -> None:
        """Close the files; what they hold stays."""
        for column in self._columns:
            column.file.close()

    def _block_crcs(self, layout: Layout) -> bytes:
        file = self._tokens.file
        file.seek(HEADER_BYTES)
        crcs = bytearray()
        for block in range(layout.blocks):
            left = min(BLOCK_BYTES, layout.crcs_begin - HEADER_BYTES - BLOCK_BYTES * block)
            crc = 0
            while left:
                part = file.read(min(COPY_BYTES, left))
                crc, left = zlib.crc32(part, crc), left - len(part)
            crcs += crc.to_bytes(4, "little")
        return bytes(crcs)


def writing_path(path: Path) -> Path:
    """Where the file at `path` is until it is whole."""
    return _beside(path, "writing")


def ends_path(path: Path) -> Path:
    """Where the ends of its documents are until then."""
    return _beside(path, "ends")


def _beside(path: Path, name: str) -> Path:
    return path.with_name(f"{path.name}.{name}")
