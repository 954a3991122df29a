"""A corpus cut into pieces of whole lines, in an order that no number of workers changes.

A plain file is cut at multiples of `PIECE_BYTES`: a piece has the lines that begin within it, and
is read by whoever works on it. A `.gz` or `.zst` can only be read from its beginning, so its pieces
carry their lines. A `.txt` is one piece: one text.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pipeline.data.store.compressed import opened
from pipeline.errors import DataError

PIECE_BYTES = 4 * 2**20
COMPRESSED = (".gz", ".zst")
BOM = b"\xef\xbb\xbf"
TEXT = ".txt"
"""How names of files end that are one text each."""


@dataclass(frozen=True)
class Piece:
    """Lines of one file."""

    file: int
    """Its place in the list of source files."""

    path: Path
    begin: int
    """Of a plain file the first byte; of a compressed one the number of the piece."""

    end: int
    lines: tuple[bytes, ...] | None
    """Of a compressed file, each with its end."""

    is_last: bool
    """Whether it is the last of its file."""

    @property
    def is_text(self) -> bool:
        """Whether it is a whole file that is one text, not rows."""
        return self.path.suffix == TEXT


def cut(files: list[Path], max_row: int, *, skip: int = 0) -> Iterator[Piece]:
    """The pieces of the files, one after the other, without the first `skip`.

    Raises:
        DataError: a compressed file is damaged.
    """
    number = 0
    for index, path in enumerate(files):
        for piece in _of_file(index, path, max_row):
            number += 1
            if number > skip:
                yield piece


def lines_of(piece: Piece, max_row: int) -> Iterator[bytes]:
    """The lines of a piece with their ends; one longer than `max_row` is cut to `max_row + 1`.

    Raises:
        DataError: the file can't be read.
    """
    if piece.lines is not None:
        yield from piece.lines
        return
    try:
        with piece.path.open("rb") as file:
            file.seek(max(0, piece.begin - 1))
            if piece.begin:
                _skip_line(file, piece.end)
            while file.tell() < piece.end and (line := file.readline(max_row + 1)):
                if _is_too_long(line, max_row):
                    _skip_line(file, piece.end)
                yield line
    except OSError as error:
        raise DataError(f"{piece.path} can't be read: {error.strerror or error}") from error


def text_of(piece: Piece, max_row: int) -> bytes:
    """A file that is one text, cut to `max_row + 1` bytes.

    Raises:
        DataError: the file can't be read.
    """
    try:
        with piece.path.open("rb") as file:
            return file.read(max_row + 1)
    except OSError as error:
        raise DataError(f"{piece.path} can't be read: {error.strerror or error}") from error


def _of_file(index: int, path: Path, max_row: int) -> Iterator[Piece]:
    if path.suffix in COMPRESSED:
        yield from _of_compressed(index, path, max_row)
        return
    size = path.stat().st_size
    if path.suffix == TEXT:
        yield Piece(index, path, 0, size, None, True)
        return
    for begin in range(0, size, PIECE_BYTES):
        end = min(begin + PIECE_BYTES, size)
        yield Piece(index, path, begin, end, None, end == size)


def _of_compressed(index: int, path: Path, max_row: int) -> Iterator[Piece]:
    lines: list[bytes] = []
    number = filled = 0
    with opened(path) as file:
        while line := file.readline(max_row + 1):
            if _is_too_long(line, max_row):
                _skip_line(file)
            if filled and filled + len(line) > PIECE_BYTES:
                yield Piece(index, path, number, number, tuple(lines), False)
                number, filled, lines = number + 1, 0, []
            lines.append(line)
            filled += len(line)
    yield Piece(index, path, number, number, tuple(lines), True)


def _is_too_long(line: bytes, max_row: int) -> bool:
    return len(line) > max_row and not line.endswith(b"\n")


def _skip_line(file: BinaryIO, end: int | None = None) -> None:
    """Go on after the end of the line, or after `end`."""
    while end is None or file.tell() < end:
        part = file.readline(PIECE_BYTES)
        if not part or part.endswith(b"\n"):
            return
