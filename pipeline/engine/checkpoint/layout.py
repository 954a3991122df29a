"""Names of directories, files and fragments."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from pipeline.errors import CheckpointError

MANIFEST = "manifest.json"
LATEST = "latest"
WRITING = ".writing-"
REMOVING = ".removing-"

_STEP = re.compile(r"step_(\d{8,})")
_BASE = re.compile(r"base-[A-Za-z0-9_.-]+")
_LABEL = re.compile(r"([^|\x00-\x1f\x7f]+)\|(\d+):(\d+)(?:@(\d+)/(\d+)/(\d+))?")


class Columns(NamedTuple):
    """Some columns of a tensor, whose elements are counted by themselves, row after row."""

    offset: int
    """Elements of each row of the tensor before these columns."""

    run: int
    """Elements of each row within these columns."""

    stride: int
    """Elements of each row."""


class Label(NamedTuple):
    """The name of a fragment, read."""

    key: str
    start: int
    stop: int
    columns: Columns | None


@dataclass(frozen=True)
class Fragment:
    """Elements `start` to `start + len(tensor)` of a flattened tensor, or of columns of it."""

    key: str
    """The whole tensor's name: any text without `|` and control characters."""

    start: int

    tensor: Tensor
    """1-D and contiguous, on any device; stored in its own dtype."""

    columns: Columns | None = None
    """The columns whose elements `start` counts; None counts those of the whole tensor."""

    def __post_init__(self) -> None:
        if self.tensor.ndim != 1 or not self.tensor.is_contiguous():
            raise ValueError(f"the fragment of {self.key} must be flat and contiguous")
        if not _LABEL.fullmatch(self.label):
            raise ValueError(f"{self.key!r} from {self.start} on is not a name of a fragment")

    @property
    def label(self) -> str:
        """`key|start:stop`, and of columns `key|start:stop@offset/run/stride`."""
        place = "" if self.columns is None else "@" + "/".join(map(str, self.columns))
        return f"{self.key}|{self.start}:{self.start + self.tensor.numel()}{place}"


def parse_label(label: str) -> Label | None:
    """What a label says; None if it is no such text, or of columns that no tensor has."""
    match = _LABEL.fullmatch(label)
    if match is None:
        return None
    key, start, stop, *place = match.groups()
    if place[0] is None:
        return Label(key, int(start), int(stop), None)
    columns = Columns(*map(int, place))
    if columns.run == 0 or columns.offset + columns.run > columns.stride:
        return None
    return Label(key, int(start), int(stop), columns)


def step_name(step: int) -> str:
    """The directory of a step."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """The step that a directory is named after, if it is."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def is_base_name(name: str) -> bool:
    """Whether frozen weights may have that directory name."""
    return _BASE.fullmatch(name) is not None


def file_name(rank: int, world_size: int) -> str:
    """The file of one process."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def part_name(rank: int) -> str:
    """What one process reports while a checkpoint is in the making."""
    return f"rank-{rank:05d}.json"


def steps_in(root: Path) -> list[Path]:
    """The directories of steps in `root`, newest first; none where there is no such directory.

    Raises:
        CheckpointError: it can't be read, so nobody knows.
    """
    try:
        found = [path for path in root.iterdir() if step_of(path) is not None and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{root} can't be read: {error.strerror}") from error
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)
