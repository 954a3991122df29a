"""Names of directories, files and fragments, and the manifest."""

import json
import platform
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from pipeline.files.durable import discard
from pipeline.system.errors import CheckpointError
from pipeline.system.faults import fault_point

FORMAT = 3

MANIFEST = "manifest.json"
LATEST = "latest"
WRITING = ".writing-"
REMOVING = ".removing-"

_STEP = re.compile(r"step_(\d{8})")
_BASE = re.compile(r"base-[A-Za-z0-9_.-]+")
_FILE = re.compile(r"rank-\d{5,}-of-\d{5,}\.safetensors")
_LABEL = re.compile(r"([^|\x00-\x1f\x7f]+)\|(\d+):(\d+)(?:@(\d+)/(\d+)/(\d+))?")


class Columns(NamedTuple):
    """A block of columns of a tensor, with its elements numbered in row-major order."""

    offset: int
    """Number of elements before the block in each row of the tensor."""

    width: int
    """Number of elements of the block in each row."""

    stride: int
    """Number of elements in each row of the tensor."""

    def count_before(self, element: int) -> int:
        """Return the number of elements in the columns that precede an element of the tensor."""
        row, column = divmod(element, self.stride)
        return row * self.width + min(max(column - self.offset, 0), self.width)

    def positions(self, first: int, last: int) -> Int[Tensor, " n"]:
        """Map elements `first` to `last` of the columns to positions in the flattened tensor."""
        number = torch.arange(first, last)
        return number // self.width * self.stride + self.offset + number % self.width


@dataclass(frozen=True)
class Fragment:
    """Elements `start` to `start + len(tensor)` of a flattened tensor, or of a column block."""

    key: str
    """The tensor's name: any text without `|` or control characters."""

    start: int

    tensor: Tensor
    """1-D and contiguous, on any device; stored in its own dtype."""

    columns: Columns | None = None
    """The columns to which `start` refers; None if it refers to the full tensor."""

    def __post_init__(self) -> None:
        if self.tensor.ndim != 1 or not self.tensor.is_contiguous():
            raise ValueError(f"the fragment of {self.key} must be 1-D and contiguous")
        if not _LABEL.fullmatch(self.label):
            raise ValueError(f"{self.key!r} starting at {self.start} is not a valid fragment name")

    @property
    def label(self) -> str:
        """`key|start:stop`, and for columns `key|start:stop@offset/width/stride`."""
        suffix = "" if self.columns is None else "@" + "/".join(map(str, self.columns))
        return f"{self.key}|{self.start}:{self.start + self.tensor.numel()}{suffix}"


def parse_label(label: str) -> tuple[str, int, int, Columns | None] | None:
    """Parse a label into key, start, stop and columns; return None for any other text."""
    match = _LABEL.fullmatch(label)
    if match is None:
        return None
    key, start, stop, *suffix = match.groups()
    columns = None if suffix[0] is None else Columns(*map(int, suffix))
    return key, int(start), int(stop), columns


def step_name(step: int) -> str:
    """Return the directory name of a step."""
    return f"step_{step:08d}"


def parse_step(path: Path) -> int | None:
    """Return the step in a directory's name, or None for any other name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def is_base_name(name: str) -> bool:
    """Return whether this is the name of a directory of frozen weights."""
    return _BASE.fullmatch(name) is not None


def file_name(rank: int, world_size: int) -> str:
    """Return the name of one process's file."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def list_steps(root: Path) -> list[Path]:
    """List the step directories in `root`, newest first, or none if `root` does not exist.

    Raises:
        CheckpointError: `root` can't be read.
    """
    try:
        paths = [path for path in root.iterdir() if parse_step(path) is not None and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{root} can't be read: {error.strerror}") from error
    return sorted(paths, reverse=True)


def remove(path: Path) -> None:
    """Rename a directory to a hidden name, then delete it; if renaming fails, leave it in place."""
    hidden = path.with_name(f"{REMOVING}{path.name}")
    discard(hidden)
    try:
        path.rename(hidden)
        fault_point("checkpoint.during_prune")
    except OSError:
        return
    discard(hidden)


@dataclass(frozen=True)
class StoredFile:
    """Size and checksum of one process's file."""

    nbytes: int
    crc32: int


def _versions() -> dict[str, str]:
    libraries = ("torch", "transformers", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in libraries}}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `manifest.json`: a JSON object and the CRC-32 of its canonical form."""

    step: int
    """The optimizer step after which the state was saved; 0 for frozen weights."""

    base: str | None
    """Name of the sibling directory that holds the frozen weights; None if there are none."""

    files: Mapping[str, StoredFile]
    """The processes' files by name, in rank order."""

    state: Mapping[str, Any]
    """The run's state, as passed to `CheckpointWriter.save`."""

    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """Time of the save, in UTC."""

    versions: Mapping[str, str] = field(default_factory=_versions)
    """Versions of Python and the libraries that wrote the checkpoint."""

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        content = {"format": FORMAT, **asdict(self)}
        return json.dumps({"crc32": _crc32(content), "manifest": content}).encode()

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read the manifest in `directory`.

        Raises:
            CheckpointError: the manifest is missing or damaged, or has a different format.
        """
        path = directory / MANIFEST
        try:
            stored = json.loads(path.read_bytes())
        except FileNotFoundError as error:
            raise CheckpointError(f"{directory} is incomplete: {path} is missing") from error
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} can't be read: {str(error)[:200]}") from error
        content = stored.get("manifest") if isinstance(stored, dict) else None
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} is not a manifest of format {FORMAT}")
        if stored.get("crc32") != _crc32(content):
            raise CheckpointError(f"{path} is damaged: CRC-32 mismatch")
        if content.pop("format", None) != FORMAT:
            raise CheckpointError(f"{path} is not a manifest of format {FORMAT}")
        try:
            files = {name: StoredFile(**file) for name, file in content.pop("files").items()}
            manifest = cls(**content, files=files)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is not a valid manifest: {error!r}") from error
        base = manifest.base
        if not all(map(_FILE.fullmatch, files)) or not (base is None or is_base_name(base)):
            raise CheckpointError(f"{path} refers to files outside the checkpoint")
        return manifest


def _crc32(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
