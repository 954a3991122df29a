"""The file of ratings: lines are appended, each on the disk before it counts, and none is changed.

A kill at any instant costs the line that was being written at most.
"""

import json
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.data.rows.shapes import SCHEMA, UNDO
from pipeline.errors import ConfigError, DataError
from pipeline.files.durable import sync_directory

Rating = Mapping[str, Any]
"""A line of the file: docs/rating.md says what it holds."""


class RatingsFile:
    """Appends ratings to a file; from any thread.

    Raises:
        ConfigError: it can't be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            sync_directory(path.parent)
            self._cut_half_line()
        except OSError as error:
            raise ConfigError(f"--ratings {path} can't be written: {error.strerror}") from None
        self._known = {str(each["id"]) for each in read_ratings(path)}

    def _cut_half_line(self) -> None:
        """What a kill left of a line is not a rating, and would make the next line none."""
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(self.path, whole)

    def add(self, rating: Mapping[str, Any], *, supersedes: str | None = None) -> str:
        """Write a rating; its id, once it is on the disk.

        Raises:
            DataError: it can't be written; the file is as before.
        """
        now = datetime.now(UTC)
        name = f"{int(now.timestamp() * 1000):012x}{secrets.token_hex(8)}"
        line = {
            "schema": SCHEMA,
            "id": name,
            "time": now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            **rating,
            "supersedes": supersedes,
        }
        with self._lock:
            self._append(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            self._known.add(name)
        return name

    def _append(self, line: bytes) -> None:
        try:
            with self.path.open("ab", buffering=0) as file:
                size, left = file.tell(), memoryview(line)
                try:
                    while left:  # a disk that is nearly full takes a part
                        left = left[file.write(left) :]
                    os.fsync(file.fileno())
                except OSError:
                    os.truncate(self.path, size)
                    raise
        except OSError as error:
            raise DataError(f"{self.path} can't be written: {error.strerror}") from None

    def undo(self, name: str, rater: str) -> None:
        """Take a rating back.

        Raises:
            KeyError: there is none of this id.
        """
        if name not in self._known:
            raise KeyError(name)
        self.add({"kind": UNDO, "rater": rater}, supersedes=name)


def read_ratings(path: Path) -> list[Rating]:
    """All lines of a file, those that were taken back included.

    Raises:
        DataError: it can't be read, or has something else.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(f"{path} can't be read: {reason}") from None
    return list(_lines(path, text))


def _lines(path: Path, text: str) -> Iterator[Rating]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rating = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path} line {number} is not valid JSON: {error.msg}") from None
        if not isinstance(rating, dict) or not {"id", "kind", "schema"} <= rating.keys():
            raise DataError(f"{path} line {number} is not a rating: it has no id, kind and schema")
        yield rating


def standing_ratings(ratings: list[Rating]) -> list[Rating]:
    """The ratings that no later line took back or replaced."""
    gone = {each["supersedes"] for each in ratings if each.get("supersedes")}
    return [each for each in ratings if each["kind"] != UNDO and each["id"] not in gone]
