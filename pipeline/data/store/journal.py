"""What of a half-written token file counts: one line after each piece.

`X.tokens.journal` has the plan in its first line, then a JSON list for every piece. Lines are not
forced to the disk: a line counts if the bytes that it speaks of have its CRC, whatever ended the
program or the machine.
"""

import json
import zlib
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

from pipeline.data.store.writer import TokenWriter
from pipeline.errors import ConfigError


@dataclass(frozen=True)
class Entry:
    """How far the work is after a piece."""

    tokens: int
    documents: int
    crc: int
    """CRC-32 of what the pieces so far added, of each its tokens and then its ends."""

    lines: int
    """Lines of the current file so far; 0 after its last."""

    bad_rows: int
    """In all files so far."""

    left_out: int = 0
    """Rows of dialogues with nothing to learn from, in all files so far."""


START = Entry(0, 0, 0, 0, 0)


class Journal:
    """The lines, appended; a context closes the file, which stays."""

    def __init__(self, path: Path, plan: str, *, resume: bool = False) -> None:
        self._file = path.open("ab" if resume else "wb")
        if not resume:
            self._file.write(plan.encode() + b"\n")
            self._file.flush()

    def add(self, entry: Entry) -> None:
        """Append an entry, after what it speaks of was handed to the system."""
        self._file.write(json.dumps(astuple(entry)).encode() + b"\n")
        self._file.flush()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()


def crc_of(parts: Iterable[bytes | memoryview], before: int) -> int:
    """CRC-32 of `parts` that goes on from another."""
    crc = before
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


def resume_from(path: Path, plan: str, writer: TokenWriter) -> tuple[int, Entry]:
    """Keep what counts of the writer's files, and cut off the rest, of the journal as well.

    Returns:
        The number of pieces that are done, and the entry after the last of them.

    Raises:
        ConfigError: the file was started with other settings, source files or tokenizer.
    """
    pieces, last = 0, START
    with path.open("r+b") as file:
        if (first := file.readline()).decode("utf-8", "replace").rstrip("\n") != plan:
            raise ConfigError(
                f"{path} was started with other settings, source files or another tokenizer; go on"
                " with those, or remove it and pack without --resume"
            )
        valid = len(first)
        while (entry := _entry(line := file.readline())) is not None:
            tokens, documents = entry.tokens - last.tokens, entry.documents - last.documents
            if crc_of(writer.read_back(tokens, documents), last.crc) != entry.crc:
                break
            writer.keep(tokens, documents)
            pieces, last, valid = pieces + 1, entry, valid + len(line)
        file.truncate(valid)
    writer.drop_rest()
    return pieces, last


def _entry(line: bytes) -> Entry | None:
    """None of a line that was cut off, and at the end."""
    if not line.endswith(b"\n"):
        return None
    try:
        return Entry(*json.loads(line))
    except (ValueError, TypeError):
        return None
