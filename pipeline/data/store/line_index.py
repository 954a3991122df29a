"""Where the rows of a JSON lines file begin, so that any of them is read at once.

    0    magic "RLINDEX1" | rows u64 | bytes of the source u64 | its time of modification, ns, i64
         | CRC-32 of all after the header u32 | bytes of the path u32 | CRC-32 of the 40 bytes u32
    44   begin of each row u64 | path of the source in UTF-8, relative to the index

Numbers are little-endian. Rows are the lines that are not empty.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import DataError
from pipeline.files.durable import rename_durably

MAGIC = b"RLINDEX1"
SUFFIX = ".index"
READ_BYTES = 16 * 2**20

_HEADER = struct.Struct("<8sQQqII")
_CRC = struct.Struct("<I")
BEGIN = _HEADER.size + _CRC.size

NEWLINE, RETURN = ord("\n"), ord("\r")


def index_path(source: Path) -> Path:
    """Where the index of a file is: `rows.jsonl.index`."""
    return source.with_name(source.name + SUFFIX)


def write_index(source: Path, out: Path) -> int:
    """Write the index of a file, in memory that does not grow with it; the number of rows.

    Raises:
        DataError: the file can't be read, is compressed, or changed meanwhile.
    """
    before = _stat(source)
    writing = out.with_name(out.name + ".writing")
    rows = crc = 0
    try:
        with writing.open("wb") as file:
            file.write(bytes(BEGIN))
            for begins in _begins(source):
                content = begins.astype("<u8").tobytes()
                file.write(content)
                rows, crc = rows + len(begins), zlib.crc32(content, crc)
            _check_unchanged(source, before)
            name = os.path.relpath(source, out.parent).encode()
            file.write(name)
            crc = zlib.crc32(name, crc)
            head = _HEADER.pack(MAGIC, rows, before.bytes, before.modified, crc, len(name))
            file.seek(0)
            file.write(head + _CRC.pack(zlib.crc32(head)))
            file.flush()
            os.fsync(file.fileno())
        rename_durably(writing, out)
    finally:
        writing.unlink(missing_ok=True)
    return rows


class LineIndex:
    """The rows of a file, by their number.

    Raises:
        DataError: the index is missing, damaged or cut off, or the file is not as it was.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                head = file.read(BEGIN)
                self._content = np.memmap(path, np.uint8, "r") if head else np.zeros(0, np.uint8)
        except OSError as error:
            raise DataError(f"{path} can't be read: {error.strerror or error}") from error
        if head[: len(MAGIC)] != MAGIC:
            raise DataError(
                f"{path} is not an index of rows; `pipeline.data.store index` writes them"
            )
        damaged = DataError(f"{path} is damaged, or was not copied whole; index its file again")
        if len(head) < BEGIN or head[_HEADER.size :] != _CRC.pack(zlib.crc32(head[: _HEADER.size])):
            raise damaged
        _, self.rows, size, modified, self._crc, length = _HEADER.unpack_from(head)
        if len(self._content) != BEGIN + 8 * self.rows + length:
            raise damaged
        name = self._content[BEGIN + 8 * self.rows :].tobytes().decode("utf-8", "replace")
        self.source = path.parent / name
        if _stat(self.source) != _Stat(size, modified):
            raise DataError(f"{self.source} changed since {path} was written; index it again")
        self._begins: NDArray[Any] = np.frombuffer(self._content, "<u8", self.rows, BEGIN)

    def row(self, number: int) -> bytes:
        """A row as it stands, without the end of its line.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= number < self.rows:
            raise IndexError(f"{self.source} has {self.rows:,} rows, not {number}")
        with self.source.open("rb") as file:
            file.seek(int(self._begins[number]))
            return file.readline().rstrip(b"\r\n")

    def is_intact(self) -> bool:
        """Whether all after the header is what was written."""
        return zlib.crc32(self._content[BEGIN:].data) == self._crc


@dataclass(frozen=True)
class _Stat:
    bytes: int
    modified: int


def _check_unchanged(source: Path, before: _Stat) -> None:
    if _stat(source) != before:
        raise DataError(f"{source} changed while it was read; index it again")


def _stat(path: Path) -> _Stat:
    if path.suffix in (".gz", ".zst"):
        raise DataError(f"{path} is compressed, and its rows can't be reached; unpack it first")
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from error
    if path.is_dir():
        raise DataError(f"{path} is a directory; name a file")
    return _Stat(stat.st_size, stat.st_mtime_ns)


def _begins(source: Path) -> Iterator[NDArray[np.int64]]:
    """The begins of the lines that are not empty, in parts."""
    begin = offset = 0
    first = -1  # the byte that the line which is read begins with
    with source.open("rb") as file:
        while part := file.read(READ_BYTES):
            content = np.frombuffer(part, np.uint8)
            if begin == offset:
                first = int(content[0])
            ends = np.flatnonzero(content == NEWLINE) + offset
            begins = np.concatenate([[begin], ends + 1])
            lengths = ends - begins[:-1]
            inside = np.maximum(begins[:-1] - offset, 0)
            firsts = content[np.minimum(inside, len(content) - 1)].astype(np.int64)
            if len(firsts) and begin < offset:
                firsts[0] = first
            yield begins[:-1][(lengths > 0) & ~((lengths == 1) & (firsts == RETURN))]
            begin, offset = int(begins[-1]), offset + len(part)
            if offset > begin >= offset - len(part):
                first = int(content[begin - offset + len(part)])
    if begin < offset and not (offset - begin == 1 and first == RETURN):
        yield np.array([begin], np.int64)
