"""Hashes of prompts and rows, and a step's record of its prompts for later steps.

`OUT/<step>/trained_prompts.hashes` and `held_out_prompts.hashes` hold the hashes
(`Example.prompt_hash`) of all prompts that the step, or a step before it, trains on or holds out: 8
bytes `PROMPTS1`, then 8 bytes per prompt, little-endian, sorted.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.config import FrozenModelConfig, StepConfig
from pipeline.data.examples import Example
from pipeline.files.durable import write_atomically
from pipeline.system.errors import DataError

TRAINED = "trained_prompts.hashes"
HELD_OUT = "held_out_prompts.hashes"
MAGIC = b"PROMPTS1"

_STEP_DIRECTORY = re.compile(r"step(\d)_\w+")
_EXPORTS = ("actor", "critic", "ema")
"""Directories of models inside a step's directory."""

Hashes = NDArray[np.uint64]


def draw(hash_: int, *, seed: int, purpose: str) -> float:
    """Return a uniform random number in (0, 1) that depends only on the arguments."""
    text = f"{seed} {purpose} {hash_}".encode()
    bits = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return ((bits >> 12) + 0.5) / 2**52  # exact in 53 bits, so it is below 1


def fingerprint(examples: Iterable[Example]) -> str:
    """Return a hash of the dialogues, their labels, and their order."""
    digest = hashlib.sha256()
    for example in examples:
        dialogues = (example.prompt, example.chosen, example.rejected)
        labels = (example.label, example.tie, example.steps, example.step_labels)
        digest.update(repr((dialogues, labels)).encode())
        if (teacher := example.teacher) is not None:
            arrays = (teacher.ids, teacher.top_ids, teacher.top_logprobs)
            digest.update(repr(teacher.ended).encode() + b"".join(a.tobytes() for a in arrays))
    return digest.hexdigest()[:16]


def unique_hashes(hashes: Iterable[int]) -> Hashes:
    """Sort the hashes and remove duplicates."""
    return np.unique(np.fromiter(hashes, np.uint64))


@dataclass(frozen=True, eq=False)
class PromptRecord:
    """Hashes of the prompts that steps train on and hold out, each sorted."""

    trained: Hashes = field(default_factory=lambda: unique_hashes(()))
    held_out: Hashes = field(default_factory=lambda: unique_hashes(()))

    def __or__(self, other: "PromptRecord") -> "PromptRecord":
        """Return the union of the two records."""
        return PromptRecord(
            np.union1d(self.trained, other.trained), np.union1d(self.held_out, other.held_out)
        )

    def write(self, directory: Path) -> None:
        """Write both files, each atomically."""
        for name, hashes in ((TRAINED, self.trained), (HELD_OUT, self.held_out)):
            write_atomically(directory / name, MAGIC + hashes.astype("<u8").tobytes())

    @classmethod
    def read(cls, directory: Path) -> "PromptRecord":
        """Read the files in `directory`; missing ones are empty, damaged ones raise DataError."""
        return cls(_read_hashes(directory / TRAINED), _read_hashes(directory / HELD_OUT))


def _read_hashes(path: Path) -> Hashes:
    try:
        content = path.read_bytes() if path.exists() else MAGIC
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}") from error
    body = content[len(MAGIC) :]
    if not content.startswith(MAGIC) or len(body) % 8:
        raise DataError(
            f"{path} is damaged: it should contain the prompts of an earlier step; run that step"
            " again, or remove the file to skip the comparison"
        )
    return np.unique(np.frombuffer(body, "<u8").astype(np.uint64))


def read_earlier_prompts(config: StepConfig) -> PromptRecord:
    """Read the prompt records of all steps before this one.

    Records are read from the directories of the step's models (and the parents of `actor`, `critic`
    and `ema`), and from those of earlier steps next to the step's output directory.
    """
    record = PromptRecord()
    for directory in dict.fromkeys(path.resolve() for path in _list_directories(config)):
        if directory != config.output_dir.resolve():
            record |= PromptRecord.read(directory)
    return record


def _list_directories(config: StepConfig) -> Iterator[Path]:
    for setting in fields(config):
        model = getattr(config, setting.name)
        if isinstance(model, FrozenModelConfig) and model.path is not None:
            path = Path(model.path).expanduser()
            yield path
            if path.name in _EXPORTS:
                yield path.parent
    this_step = _STEP_DIRECTORY.fullmatch(config.output_dir.name)
    if this_step is None or not config.output_dir.parent.is_dir():
        return
    for path in sorted(config.output_dir.parent.iterdir()):
        other_step = _STEP_DIRECTORY.fullmatch(path.name)
        if other_step is not None and other_step[1] < this_step[1]:
            yield path


def isin(hashes: Sequence[int], known: Hashes) -> list[bool]:
    """Return whether each hash is among `known`."""
    return np.isin(np.array(hashes, np.uint64), known).tolist()
