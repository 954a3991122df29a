"""One try of all processes to make one directory. The file system is their meeting place.

Every process writes its file into `.writing-*` and then a part: what the manifest shall say of that
file, or why there is none. The first process waits for all parts and renames the directory, or
leaves its verdict there for the others. No collective is involved, so that a save in the background
can't get between those of training, and one that failed can't hang it.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.engine.checkpoint.data_file import copy_data_file, write_data_file
from pipeline.engine.checkpoint.host_copy import HostFragment
from pipeline.engine.checkpoint.layout import WRITING, file_name, part_name
from pipeline.engine.checkpoint.local import LocalPart
from pipeline.engine.checkpoint.manifest import (
    Manifest,
    StoredFile,
    attempt_of,
    library_versions,
    now,
)
from pipeline.errors import CheckpointError
from pipeline.faults import fault_point
from pipeline.files.durable import discard, publish

VERDICT = "verdict.json"

POLL_SECONDS = (0.005, 0.25)
"""Seconds between two looks at the others' files: at first, and after a long wait."""

LOOKS_A_SECOND = 1000
"""Looks of all processes together in a second at most: they share a file system."""


class SaveError(Exception):
    """A checkpoint was not written; training knows nothing of it."""


@dataclass(frozen=True)
class Saved:
    """What the manifest of a checkpoint shall say besides its files."""

    step: int
    base: str | None
    state: Mapping[str, Any]


def reason_of(error: Exception, rank: int, needed: int) -> str:
    """Why that process could not save its part, of so many bytes, as the end of a sentence."""
    if isinstance(error, SaveError | CheckpointError):
        return str(error)
    reason = getattr(error, "strerror", None) or repr(error)
    place = f" at {error.filename}" if isinstance(error, OSError) and error.filename else ""
    amount = f" ({needed:,} bytes needed)" if needed else ""
    return f"rank {rank}: {reason}{place}{amount}"


class Attempt:
    """One process's side of an attempt at `root / target`."""

    def __init__(
        self,
        root: Path,
        target: str,
        *,
        name: str,
        rank: int,
        world_size: int,
        timeout_seconds: int | float,
    ) -> None:
        self.name = name
        self.target = root / target
        self.directory = root / f"{WRITING}{target}-{name}"
        self.rank = rank
        self._world_size = world_size
        self._timeout_seconds = timeout_seconds

    def write(self, fragments: Sequence[HostFragment]) -> None:
        """Write this process's file and part.

        Raises:
            OSError: the system can't.
        """
        self.directory.mkdir(exist_ok=True)
        stored = write_data_file(self._file(self.rank), fragments)
        self._publish(self._part(self.rank), {"file": stored.to_json()})

    def copy(self, part: LocalPart) -> None:
        """Copy this process's file from its machine's disk, and write its part.

        Raises:
            OSError: the system can't.
            CheckpointError: the file on that disk is damaged.
        """
        fault_point("upload.before_copy")
        self.directory.mkdir(exist_ok=True)
        copy_data_file(part.file, self._file(self.rank), part.stored)
        self._publish(self._part(self.rank), {"file": part.stored.to_json()})

    def fail(self, sentence: str) -> None:
        """Let the others know, if the disk permits, and take no more of its space."""
        discard(self._file(self.rank))
        name = VERDICT if self.rank == 0 else part_name(self.rank)
        try:
            self._publish(self.directory / name, {"failed": sentence})
        except OSError:
            discard(self.directory)  # which says the same, only without a reason

    def keep_target(self) -> None:
        """Let the others know that the directory was there already."""
        self.directory.mkdir(exist_ok=True)
        self._publish(self.directory / VERDICT, {"kept": True})
        self.clear()

    def clear(self) -> None:
        """Remove all but the verdict, and that too where nobody waits for it; the first process's.

        The verdict goes with the next attempt, or with the writer.
        """
        if self._world_size == 1:
            discard(self.directory)
            return
        for path in self.directory.glob("*"):
            if path.name != VERDICT:
                discard(path)

    def collect(self) -> dict[str, StoredFile]:
        """What all processes wrote, by file name; to be called by the first one.

        Raises:
            SaveError: one of them failed, or gave no answer in time.
        """
        parts: dict[int, StoredFile] = {}

        def all_there() -> bool:
            try:  # one request for all ranks
                there = {path.name for path in self.directory.iterdir()}
            except FileNotFoundError:
                raise SaveError("a rank gave it up") from None
            for rank in range(self._world_size):
                if rank in parts or part_name(rank) not in there:
                    continue
                if (part := self._read(self._part(rank))) is not None:
                    parts[rank] = self._checked(rank, part)
            return len(parts) == self._world_size

        if not self._wait_for(all_there, self._timeout_seconds):
            absent = sorted(set(range(self._world_size)) - parts.keys())
            raise SaveError(
                f"nothing came from rank {', '.join(map(str, absent))} within"
                f" {self._timeout_seconds:g} seconds"
            )
        return {file_name(rank, self._world_size): parts[rank] for rank in sorted(parts)}

    def manifest(self, saved: Saved, *, by: str | None = None) -> Manifest:
        """The manifest of what all processes wrote, once they have; `by` is another attempt's name.

        Raises:
            SaveError: one of them failed, or gave no answer in time.
        """
        return Manifest(
            step=saved.step,
            attempt=by or self.name,
            created=now(),
            versions=library_versions(),
            files=self.collect(),
            base=saved.base,
            state=saved.state,
        )

    def remove_parts(self) -> None:
        """Leave only what belongs to the checkpoint."""
        for rank in range(self._world_size):
            self._part(rank).unlink()

    def await_verdict(self) -> None:
        """Return when the first process has made the directory, or kept the one it found.

        Raises:
            SaveError: it gave up, or gave no answer in time.
        """
        if not self._wait_for(self._is_decided, 2 * self._timeout_seconds):
            raise SaveError(f"rank 0 gave no answer within {2 * self._timeout_seconds:g} seconds")
        verdict = self._read(self.directory / VERDICT) or {}
        if "kept" in verdict or self._is_committed():
            return
        discard(self._file(self.rank))
        discard(self._part(self.rank))
        raise SaveError(verdict.get("failed", "rank 0 gave it up"))

    def await_removal_of_target(self) -> bool:
        """Whether the first process has removed the directory, because it is damaged.

        Raises:
            SaveError: it gave no answer in time.
        """
        if not self._wait_for(
            lambda: self._has_verdict() or not self.target.exists(), self._timeout_seconds
        ):
            raise SaveError(f"rank 0 gave no answer within {self._timeout_seconds:g} seconds")
        return not self._has_verdict()

    def _has_verdict(self) -> bool:
        return (self.directory / VERDICT).exists()

    def _is_decided(self) -> bool:
        return self._has_verdict() or not self.directory.exists()

    def _is_committed(self) -> bool:
        try:
            return attempt_of(self.target) == self.name
        except CheckpointError:
            return False

    def _checked(self, rank: int, part: dict[str, Any]) -> StoredFile:
        if "failed" in part:
            raise SaveError(part["failed"])
        stored = StoredFile.from_json(part["file"])
        size = self._file(rank).stat().st_size
        if size != stored.nbytes:
            raise SaveError(f"rank {rank} wrote {stored.nbytes:,} bytes, but there are {size:,}")
        return stored

    def _wait_for(self, condition: Callable[[], bool], seconds: int | float) -> bool:
        end = time.monotonic() + seconds
        pause, longest = POLL_SECONDS
        longest = max(longest, self._world_size / LOOKS_A_SECOND)
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, longest)
        return True

    def _file(self, rank: int) -> Path:
        return self.directory / file_name(rank, self._world_size)

    def _part(self, rank: int) -> Path:
        return self.directory / part_name(rank)

    def _publish(self, path: Path, content: dict[str, Any]) -> None:
        publish(path, json.dumps(content).encode())

    def _read(self, path: Path) -> dict[str, Any] | None:
        try:
            return json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
