"""Checkpoints on a machine's own disk, until they are in the directory of the run.

    LOCAL/<run>/rank-00000-of-00002/step_00000120-<attempt>/part.json
    LOCAL/<run>/rank-00000-of-00002/step_00000120-<attempt>/rank-00000-of-00002.safetensors

`<run>` is the same on all machines and no other run's. A process writes to a directory of its own,
and a part of a checkpoint gets its name by one rename: so it is whole or not there. Whether all
processes have theirs is known to none; those of the next start find out together.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.engine.checkpoint.data_file import write_data_file
from pipeline.engine.checkpoint.header import read_header
from pipeline.engine.checkpoint.host_copy import HostFragment
from pipeline.engine.checkpoint.layout import WRITING, file_name, step_name
from pipeline.engine.checkpoint.manifest import StoredFile
from pipeline.engine.checkpoint.removal import remove
from pipeline.errors import CheckpointError
from pipeline.faults import fault_point
from pipeline.files.durable import discard, rename_durably, sync_directory, write_durably

PART = "part.json"


@dataclass(frozen=True)
class Identity:
    """Which process's part it is, and of which checkpoint."""

    step: int
    attempt: str
    """Name of the save that wrote it, which no other checkpoint has."""

    rank: int
    world_size: int

    @property
    def file(self) -> str:
        """The name of its file, here as in the checkpoint."""
        return file_name(self.rank, self.world_size)


@dataclass(frozen=True)
class LocalPart:
    """One process's part of a checkpoint, on the disk of its machine."""

    path: Path
    """Its directory."""

    identity: Identity
    stored: StoredFile
    base: str | None
    """The frozen weights, which are in the directory of the run."""

    state: Mapping[str, Any] | None
    """The run's state, which the part of its first process has; None in the others."""

    @property
    def file(self) -> Path:
        """The file with its tensors."""
        return self.path / self.identity.file

    @classmethod
    def read(cls, path: Path) -> "LocalPart":
        """The part in a directory; of its file the size and the header are looked at.

        Raises:
            CheckpointError: it is not as it was written.
        """
        try:
            text, crc32 = (path / PART).read_bytes().split(b"\n")
            content = json.loads(text)
            part = cls(
                path,
                Identity(**content["identity"]),
                StoredFile.from_json(content["file"]),
                content["base"],
                content["state"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path / PART} can't be read: {error}") from error
        if zlib.crc32(text) != int(crc32, 16):
            raise CheckpointError(f"{path / PART} is damaged: it is not what its CRC-32 says")
        read_header(part.file, nbytes=part.stored.nbytes, crc32=part.stored.header_crc32)
        return part

    def to_bytes(self) -> bytes:
        """The content of its `part.json`: a line of JSON, and the CRC-32 of that line."""
        text = json.dumps(
            {
                "identity": vars(self.identity),
                "file": self.stored.to_json(),
                "base": self.base,
                "state": self.state,
            }
        ).encode()
        return text + f"\n{zlib.crc32(text):08x}".encode()


class LocalDirectory:
    """What one process keeps on its machine: the newest parts of checkpoints, in their order.

    Args:
        root: of the run, on this machine.
        rank: of the process.
        world_size: of the job.

    Raises:
        OSError: the directory can't be made, or written to.
    """

    def __init__(self, root: Path, *, rank: int, world_size: int) -> None:
        self.root = root
        self._rank, self._world_size = rank, world_size
        self._own = root / file_name(rank, world_size).removesuffix(".safetensors")
        self._own.mkdir(parents=True, exist_ok=True)
        probe = self._own / f"{WRITING}probe"
        probe.write_bytes(b"")
        probe.unlink()

    def write(
        self,
        step: int,
        attempt: str,
        fragments: Sequence[HostFragment],
        *,
        base: str | None,
        state: Mapping[str, Any] | None,
    ) -> LocalPart:
        """Write this process's part, onto the disk.

        Raises:
            OSError: the system can't; nothing is left of it.
        """
        identity = Identity(step, attempt, self._rank, self._world_size)
        target = self._own / f"{step_name(step)}-{attempt}"
        making = target.with_name(f"{WRITING}{target.name}")
        try:
            making.mkdir()
            stored = write_data_file(making / identity.file, fragments)
            part = LocalPart(target, identity, stored, base, state)
            write_durably(making / PART, part.to_bytes())
            sync_directory(making)
            fault_point("local.before_rename")
            rename_durably(making, target)
        except BaseException:
            discard(making)
            raise
        fault_point("local.after_rename")
        return part

    def found(self) -> list[LocalPart]:
        """The parts of all processes that are on this machine, as far as they can be read."""
        parts: list[LocalPart] = []
        for path in sorted(self.root.glob("rank-*/step_*")):
            try:
                parts.append(LocalPart.read(path))
            except CheckpointError:
                continue
        return parts

    def neighbours(self) -> set[str]:
        """Names of the directories of processes that are on this machine, or were."""
        return {path.name for path in self.root.glob("rank-*")}

    @property
    def name(self) -> str:
        """The name of this process's directory."""
        return self._own.name

    def keep(self, parts: Sequence[LocalPart], *, strangers: Sequence[str] = ()) -> None:
        """Remove all but these parts, and the directories of processes that are gone."""
        spared = {part.path for part in parts}
        with suppress(OSError):  # a disk that is gone keeps nothing
            for path in list(self._own.iterdir()):
                if path not in spared:
                    remove(path, "local")
        for name in strangers:
            discard(self.root / name)

    def clear(self) -> None:
        """Remove this process's directory; the run's and its parent's go with the last one's."""
        discard(self._own)
        with suppress(OSError):
            self.root.rmdir()


def on_one_disk(first: Path, second: Path) -> bool:
    """Whether two directories that are there are on one file system."""
    return first.stat().st_dev == second.stat().st_dev
