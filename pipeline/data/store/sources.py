"""The files that a token file is made of."""

import glob
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.data.store.compressed import check_readable
from pipeline.data.store.pieces import TEXT
from pipeline.errors import DataError

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt")


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when the work began."""

    path: Path
    bytes: int
    modified: int
    """Nanoseconds since 1970."""


def find_sources(patterns: Sequence[str], *, rows_alone: bool = False) -> list[SourceFile]:
    """The files that paths and patterns (`*`, `**`) name: in the order given, sorted in each.

    With `rows_alone` a file that is one text is none of them.

    Raises:
        DataError: one names nothing, a directory, or a file of another kind.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        literal = Path(pattern).exists()
        names = [pattern] if literal else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
        if not names:
            raise DataError(f"there is no file {pattern}")
        found |= dict.fromkeys(map(Path, names))
    if rows_alone and (texts := [path for path in found if path.suffix == TEXT]):
        raise DataError(f"{texts[0]} is one text, and dialogues are rows of .jsonl files")
    return [_source(path) for path in found]


def sources_hash(sources: Sequence[SourceFile]) -> str:
    """SHA-256 of names and sizes: the same for copies of the files elsewhere."""
    names = [[source.path.name, source.bytes] for source in sources]
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


def check_unchanged(sources: Sequence[SourceFile]) -> None:
    """Refuse files that were written to while they were read.

    Raises:
        DataError: one has another size or time of modification.
    """
    for source in sources:
        if _source(source.path) != source:
            raise DataError(f"{source.path} changed while it was packed; pack it again")


def _source(path: Path) -> SourceFile:
    if path.is_dir():
        raise DataError(f"{path} is a directory; name its files, as in '{path}/*.jsonl'")
    if not path.name.endswith(SUFFIXES):
        raise DataError(f"{path} is none of what can be packed: {', '.join(SUFFIXES)}")
    check_readable(path)
    try:
        stat = path.stat()
        path.open("rb").close()
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}") from error
    return SourceFile(path, stat.st_size, stat.st_mtime_ns)
