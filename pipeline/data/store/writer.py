"""Writes a token file in order: `X.writing` until it is whole, then `X`.

Ends of documents wait in `X.ends`, so that memory does not grow with their number.
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
    Layout,
    Origin,
    encode_footer,
    encode_header,
)
from pipeline.errors import DataError
from pipeline.files.durable import rename_durably

COPY_BYTES = 2**20


class TokenWriter:
    """Tokens and ends of documents, appended to the two files; a context closes them.

    Args:
        path: of the token file.
        width: bytes of a token.
        resume: go on with the two files as they are; `keep` says how much of them counts.
    """

    def __init__(self, path: Path, width: int, *, resume: bool = False) -> None:
        self.path, self.width = path, width
        self.writing, self.ends_path = writing_path(path), ends_path(path)
        mode = "r+b" if resume else "w+b"
        self._file: BinaryIO = self.writing.open(mode)
        self._ends: BinaryIO = self.ends_path.open(mode)
        self.tokens = self.documents = 0
        if not resume:
            self.drop_rest()

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def append(self, ids: NDArray[Any], lengths: NDArray[Any]) -> tuple[memoryview, memoryview]:
        """Add documents.

        Args:
            ids: the tokens of all, [tokens], each below the vocabulary's size.
            lengths: how many of them each document has, [documents]; their sum is `tokens`.

        Returns:
            The bytes that were appended to the tokens and to the ends.
        """
        ends = (self.tokens + np.cumsum(lengths, dtype=np.uint64)).astype("<u8")
        tokens = np.ascontiguousarray(ids, dtype=f"<u{self.width}")
        self._file.write(tokens.data)
        self._ends.write(ends.data)
        self.tokens += len(ids)
        self.documents += len(lengths)
        return tokens.data, ends.data

    def append_ends(self, ends: NDArray[np.uint64]) -> None:
        """Add where documents end whose tokens were appended without lengths: [documents]."""
        self._ends.write(ends.astype("<u8").data)
        self.documents += len(ends)

    def discard(self) -> None:
        """Close and remove both files."""
        self.close()
        self.writing.unlink(missing_ok=True)
        self.ends_path.unlink(missing_ok=True)

    def flush(self) -> None:
        """Hand all to the system: from now on it outlives this process."""
        self._file.flush()
        self._ends.flush()

    def read_back(self, tokens: int, documents: int) -> Iterator[bytes]:
        """What was appended for the next `tokens` and `documents`, of a file that is resumed.

        The caller compares it with its checksum, and then calls `keep`.
        """
        for file, start, size in (
            (self._file, HEADER_BYTES + self.width * self.tokens, self.width * tokens),
            (self._ends, END_BYTES * self.documents, END_BYTES * documents),
        ):
            file.seek(start)
            left = size
            while left and (part := file.read(min(COPY_BYTES, left))):
                left -= len(part)
                yield part

    def keep(self, tokens: int, documents: int) -> None:
        """Take the next `tokens` and `documents` of a file that is resumed as appended."""
        self.tokens += tokens
        self.documents += documents

    def drop_rest(self) -> None:
        """Cut off what was not kept."""
        for file, size in (
            (self._file, HEADER_BYTES + self.width * self.tokens),
            (self._ends, END_BYTES * self.documents),
        ):
            file.truncate(size)
            file.seek(size)

    def finish(self, origin: Origin) -> Layout:
        """Write ends, CRCs, header and footer, and give the file its name, for good.

        Raises:
            DataError: the files have not the size that the appended tokens and documents take.
        """
        layout = Layout(self.width, self.tokens, self.documents)
        self.flush()
        sizes = self.writing.stat().st_size, self.ends_path.stat().st_size
        if sizes != (layout.tokens_end, END_BYTES * self.documents):
            raise DataError(
                f"{self.writing} has not the size of what was written: another program changed it;"
                " remove it and pack again"
            )
        self._file.seek(layout.ends_begin)
        self._ends.seek(0)
        while part := self._ends.read(COPY_BYTES):
            self._file.write(part)
        self._file.truncate(layout.crcs_begin)
        crcs = self._block_crcs(layout)
        self._file.seek(layout.crcs_begin)
        self._file.write(crcs + encode_footer(layout, crcs))
        self._file.seek(0)
        self._file.write(encode_header(layout, origin))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        rename_durably(self.writing, self.path)
        self.ends_path.unlink()
        return layout

    def close(self) -> None:
        """Close both files; what they hold stays."""
        self._file.close()
        self._ends.close()

    def _block_crcs(self, layout: Layout) -> bytes:
        self._file.seek(HEADER_BYTES)
        crcs = bytearray()
        for block in range(layout.blocks):
            left = min(BLOCK_BYTES, layout.crcs_begin - HEADER_BYTES - BLOCK_BYTES * block)
            crc = 0
            while left:
                part = self._file.read(min(COPY_BYTES, left))
                crc, left = zlib.crc32(part, crc), left - len(part)
            crcs += crc.to_bytes(4, "little")
        return bytes(crcs)


def writing_path(path: Path) -> Path:
    """Where the file at `path` is until it is whole."""
    return path.with_name(path.name + ".writing")


def ends_path(path: Path) -> Path:
    """Where the ends of its documents are until then."""
    return path.with_name(path.name + ".ends")
