"""Reads a token file by memory map; a block is compared with its CRC when it is first read."""

import mmap
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.store.layout import (
    BLOCK_BYTES,
    END_BYTES,
    FOOTER_BYTES,
    HEADER_BYTES,
    RECORD_BYTES,
    decode_header,
    encode_footer,
)
from pipeline.data.store.marks import RECORD
from pipeline.errors import DataError


class TokenFile:
    """The documents of one token file.

    Raises:
        DataError: the file is missing, a directory, of another format, cut off, or its header or
            footer is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                head = file.read(HEADER_BYTES)
                size = file.seek(0, 2)
                self.layout, self.origin = decode_header(self.path, head)
                _check_size(self.path, size, self.layout.size)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise DataError(f"{self.path} can't be read: {error.strerror or error}") from error
        layout = self.layout
        crcs = self._map[layout.crcs_begin : layout.size - FOOTER_BYTES]
        if self._map[layout.size - FOOTER_BYTES :] != encode_footer(layout, crcs):
            raise DataError(f"{self.path} has a damaged footer; copy it again, or pack it again")
        self._crcs = np.frombuffer(crcs, "<u4")
        self._checked = np.zeros(layout.blocks, bool)
        self._tokens = np.frombuffer(self._map, layout.dtype, layout.tokens, HEADER_BYTES)
        self._ends = np.frombuffer(self._map, "<u8", layout.documents, layout.ends_begin)
        marked = layout.documents * layout.has_marks
        self._records = np.frombuffer(self._map, RECORD, marked, layout.records_begin)
        self._bits = np.frombuffer(
            self._map, np.uint8, layout.crcs_begin - layout.bits_begin, layout.bits_begin
        )

    @property
    def documents(self) -> int:
        """Number of documents."""
        return self.layout.documents

    @property
    def has_marks(self) -> bool:
        """Whether its documents are dialogues, with marks."""
        return self.layout.has_marks

    def span(self, document: int) -> tuple[int, int]:
        """The first token of a document among all tokens, and the one after its last.

        Raises:
            IndexError: there is no such document.
            DataError: the block is damaged.
        """
        if not 0 <= document < self.documents:
            raise IndexError(f"{self.path} has {self.documents:,} documents, not {document}")
        first = max(0, document - 1)
        begin = self.layout.ends_begin
        self._check_bytes(begin + END_BYTES * first, begin + END_BYTES * (document + 1))
        start = int(self._ends[document - 1]) if document else 0
        end = int(self._ends[document])
        if not start <= end <= self.layout.tokens:
            raise DataError(
                f"{self.path}: document {document} ends before it begins; pack it again"
            )
        return start, end

    def tokens(self, document: int) -> NDArray[Any]:
        """The tokens of a document, its eos included: a read-only view, [tokens] of u16 or u32.

        Raises:
            IndexError: there is no such document.
            DataError: a block that it lies in is damaged.
        """
        return self.slice(*self.span(document))

    def slice(self, start: int, end: int) -> NDArray[Any]:
        """Tokens `start` to `end` of all documents, one after the other: [end - start], a view.

        Raises:
            DataError: a block that they lie in is damaged.
        """
        width = self.layout.width
        self._check_bytes(HEADER_BYTES + width * start, HEADER_BYTES + width * end)
        return self._tokens[start:end]

    def ends(self, start: int, end: int) -> NDArray[np.uint64]:
        """Where documents `start` to `end` end: [end - start], a view.

        Raises:
            DataError: the block is damaged.
        """
        begin = self.layout.ends_begin
        self._check_bytes(begin + END_BYTES * start, begin + END_BYTES * end)
        return self._ends[start:end]

    def trained(self, start: int, end: int) -> NDArray[np.bool_]:
        """Which of tokens `start` to `end` are learned: [end - start]; of dialogues alone.

        Raises:
            DataError: a block that says it is damaged.
        """
        first, last = start // 8, -(-end // 8)
        begin = self.layout.bits_begin
        self._check_bytes(begin + first, begin + last)
        bits = np.unpackbits(self._bits[first:last], bitorder="little")
        return bits[start - 8 * first : end - 8 * first].view(np.bool_)

    def is_trained(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which tokens of these ascending places are learned: [places]; of dialogues alone.

        Raises:
            DataError: a block that says it is damaged.
        """
        begin = self.layout.bits_begin
        self._check_bytes(begin + int(places[0]) // 8, begin + int(places[-1]) // 8 + 1)
        return (self._bits[places // 8] >> (places % 8).astype(np.uint8) & 1).view(np.bool_)

    def records(self, start: int, end: int) -> NDArray[np.void]:
        """The records of documents `start` to `end`: [end - start] of `RECORD`, a view.

        Raises:
            DataError: a block that they lie in is damaged.
        """
        begin = self.layout.records_begin
        self._check_bytes(begin + RECORD_BYTES * start, begin + RECORD_BYTES * end)
        return self._records[start:end]

    def document_at(self, token: int) -> int:
        """The number of the document that a token lies in; of those after the last, `documents`.

        Raises:
            DataError: a block of the ends that is looked at is damaged.
        """

        def end(document: int) -> int:
            return int(self.ends(document, document + 1)[0])

        return bisect_right(range(self.documents), token, key=end)

    @property
    def checksum(self) -> int:
        """CRC-32 of the CRCs of its blocks: tells one content from another."""
        return zlib.crc32(self._crcs.tobytes())

    def damaged_blocks(self) -> Iterator[int]:
        """Numbers of the blocks whose bytes differ from their CRC; reads all of the file once."""
        for block in range(self.layout.blocks):
            self._checked[block] = self._is_intact(block)
            if not self._checked[block]:
                yield block
            self.release()

    def release(self) -> None:
        """Give the pages that were read back to the system, which reads them again if needed."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def block_span(self, block: int) -> tuple[int, int]:
        """The first byte of a block in the file, and the one after its last."""
        begin = HEADER_BYTES + BLOCK_BYTES * block
        return begin, min(begin + BLOCK_BYTES, self.layout.crcs_begin)

    def _check_bytes(self, begin: int, end: int) -> None:
        if end <= begin:
            return
        first = (begin - HEADER_BYTES) // BLOCK_BYTES
        last = (end - 1 - HEADER_BYTES) // BLOCK_BYTES
        for block in range(first, last + 1):
            if self._checked[block]:
                continue
            if not self._is_intact(block):
                raise DataError(f"{self.damage(block)}; copy the file again, or pack it again")
            self._checked[block] = True

    def damage(self, block: int) -> str:
        """What to say of a damaged block."""
        begin, end = self.block_span(block)
        return f"{self.path}: block {block} (bytes {begin:,} to {end:,}) differs from its CRC-32"

    def _is_intact(self, block: int) -> bool:
        begin, end = self.block_span(block)
        with memoryview(self._map) as whole, whole[begin:end] as part:
            return zlib.crc32(part) == int(self._crcs[block])


def _check_size(path: Path, size: int, expected: int) -> None:
    if size < expected:
        raise DataError(
            f"{path} ends at byte {size:,} of {expected:,}: it was not copied whole; copy it again"
        )
    if size > expected:
        raise DataError(f"{path} goes on after byte {expected:,}, its end; copy it again")
