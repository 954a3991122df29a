"""Data paths of a corpus: which files they name, and what these are."""

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.config import TextDataConfig
from pipeline.data.sources import split_weight
from pipeline.data.store.sources import SUFFIXES as TEXTS
from pipeline.errors import DataError

Kind = Literal["tokens", "megatron", "modalities", "text"]
SUFFIXES: dict[str, Kind] = {
    ".tokens": "tokens",
    ".bin": "megatron",
    ".idx": "megatron",
    ".pbin": "modalities",
}
"""What a file is by the end of its name, which for texts is one of `TEXTS`."""


@dataclass(frozen=True)
class CorpusPath:
    """A data path, and the files of one kind that it names."""

    name: str
    """Without its weight."""

    weight: float | None
    files: tuple[Path, ...]
    kind: Kind


def training_paths(data: TextDataConfig) -> list[CorpusPath]:
    """What `data.path` names.

    Raises:
        DataError: nothing, a directory, files of an unknown kind or of several.
    """
    if not data.path:
        raise DataError(
            "data.path names no corpus; give token files, which `python -m pipeline.data.store"
            " pack` writes, or text (.jsonl, .txt)"
        )
    return [_read(spec, "data.path") for spec in data.path]


def evaluation_paths(data: TextDataConfig) -> list[CorpusPath]:
    """What `data.eval_path` names; nothing where evaluation reads documents of `data.path`.

    Raises:
        DataError: as `training_paths`.
    """
    return [_read(spec, "data.eval_path") for spec in data.eval_path]


def _read(spec: str, setting: str) -> CorpusPath:
    name, weight = split_weight(spec)
    path = Path(name).expanduser()
    files = [path] if path.exists() else [Path(each) for each in sorted(_matches(path))]
    if not files and path.with_name(f"{path.name}.idx").exists():  # as Megatron names its data
        files = [path.with_name(f"{path.name}.idx")]
    if not files:
        raise DataError(f"{setting} {name}: there is no such file")
    kinds: set[Kind] = {_kind(each, setting) for each in files}
    if len(kinds) > 1:
        raise DataError(
            f"{setting} {name} names files of several kinds ({', '.join(sorted(kinds))}); give a"
            " path for each"
        )
    kind = kinds.pop()
    if kind == "megatron":  # both of its files may match
        files = sorted({each.with_suffix(".idx") for each in files})
    return CorpusPath(name, weight, tuple(files), kind)


def _matches(path: Path) -> list[str]:
    return glob.glob(str(path), recursive=True)  # noqa: PTH207


def _kind(path: Path, setting: str) -> Kind:
    if path.is_dir():
        raise DataError(f"{setting} {path} is a directory; name its files, as in '{path}/*.tokens'")
    found = SUFFIXES.get(path.suffix)
    if found is None and not path.name.endswith(TEXTS):
        raise DataError(
            f"{setting} {path} is not a corpus; give token files (.tokens), Megatron's .bin and"
            f" .idx, Modalities' .pbin, or text ({', '.join(TEXTS)})"
        )
    return found or "text"
