"""What a step leaves behind about its prompts, so that later steps keep apart from it.

`OUT/<step>/trained_prompts.hashes` and `held_out_prompts.hashes` hold the hashes (`prompt_hash`) of
all prompts that the step, or a step it started from, trains on or holds out: 8 bytes `PROMPTS1`,
then 8 bytes a prompt, little-endian, ascending.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.config import FrozenModelConfig, StepConfig
from pipeline.errors import DataError

TRAINED = "trained_prompts.hashes"
HELD_OUT = "held_out_prompts.hashes"
MAGIC = b"PROMPTS1"

_STEP_DIRECTORY = re.compile(r"step(\d)_\w+")
_EXPORTS = ("actor", "critic", "ema")
"""Directories of models inside that of a step."""

Hashes = NDArray[np.uint64]


def _none() -> Hashes:
    return np.empty(0, np.uint64)


def as_hashes(numbers: Iterable[int]) -> Hashes:
    """The numbers in ascending order, each once."""
    return np.unique(np.fromiter(numbers, np.uint64))


@dataclass(frozen=True, eq=False)
class PromptRecord:
    """Hashes of the prompts that steps train on and hold out, each ascending."""

    trained: Hashes = field(default_factory=_none)
    held_out: Hashes = field(default_factory=_none)

    def __or__(self, other: "PromptRecord") -> "PromptRecord":
        """What is in either."""
        return PromptRecord(
            np.union1d(self.trained, other.trained), np.union1d(self.held_out, other.held_out)
        )

    def write(self, directory: Path) -> None:
        """Write both files; each is whole or as it was."""
        for name, hashes in ((TRAINED, self.trained), (HELD_OUT, self.held_out)):
            partial = directory / f"{name}.partial"
            partial.write_bytes(MAGIC + hashes.astype("<u8").tobytes())
            partial.replace(directory / name)

    @classmethod
    def read(cls, directory: Path) -> "PromptRecord":
        """What `write` left in `directory`; raises DataError where that is damaged."""
        return cls(_read(directory / TRAINED), _read(directory / HELD_OUT))


def _read(path: Path) -> Hashes:
    if not path.exists():
        return _none()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}") from error
    body = content[len(MAGIC) :]
    if not content.startswith(MAGIC) or len(body) % 8:
        raise DataError(
            f"{path} is damaged: it should hold the prompts of an earlier step; run that step"
            " again, or remove the file to do without the comparison"
        )
    return np.unique(np.frombuffer(body, "<u8").astype(np.uint64))


def earlier_prompts(config: StepConfig) -> PromptRecord:
    """The prompts of the steps before this one, of all whose record is found.

    Looked through are the directories of the models the step reads (and the one above `actor`,
    `critic` and `ema`), and of the earlier steps beside its own output directory.
    """
    record = PromptRecord()
    for directory in dict.fromkeys(path.resolve() for path in _directories(config)):
        if directory != config.output_dir.resolve():
            record |= PromptRecord.read(directory)
    return record


def _directories(config: StepConfig) -> Iterator[Path]:
    for each in fields(config):
        model = getattr(config, each.name)
        if isinstance(model, FrozenModelConfig) and model.path is not None:
            path = Path(model.path).expanduser()
            yield path
            if path.name in _EXPORTS:
                yield path.parent
    own = _STEP_DIRECTORY.fullmatch(config.output_dir.name)
    if own is None or not config.output_dir.parent.is_dir():
        return
    for beside in sorted(config.output_dir.parent.iterdir()):
        other = _STEP_DIRECTORY.fullmatch(beside.name)
        if other is not None and other[1] < own[1]:
            yield beside


def contained(hashes: Sequence[int], known: Hashes) -> list[bool]:
    """For each hash whether it is among `known`."""
    return np.isin(np.array(hashes, np.uint64), known).tolist()
