"""`manifest.json`: what a checkpoint consists of, and the state that is no tensor."""

import json
import platform
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.engine.checkpoint.layout import MANIFEST, file_name, is_base_name, parse_label
from pipeline.errors import CheckpointError

FORMAT = 1
WITH_COLUMNS = 2
"""The format where fragments may be columns of a tensor; written where some are."""

MAX_BYTES = 2**30

TYPES = {
    "step": int,
    "attempt": str,
    "created": str,
    "versions": dict,
    "files": dict,
    "state": dict,
}


@dataclass(frozen=True)
class StoredFragment:
    """One fragment as it lies in a file."""

    dtype: str
    """As safetensors calls it."""

    crc32: int


@dataclass(frozen=True)
class StoredFile:
    """One process's file."""

    nbytes: int
    header_crc32: int
    """Of everything before the first tensor."""

    fragments: Mapping[str, StoredFragment]
    """By label, `key|start:stop`."""

    def to_json(self) -> dict[str, Any]:
        """The manifest's words for it."""
        return {
            "bytes": self.nbytes,
            "header_crc32": _hex(self.header_crc32),
            "fragments": {
                label: {"dtype": fragment.dtype, "crc32": _hex(fragment.crc32)}
                for label, fragment in self.fragments.items()
            },
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "StoredFile":
        """The inverse of `to_json`.

        Raises:
            ValueError, KeyError, TypeError: it is something else.
        """
        return cls(
            nbytes=int(stored["bytes"]),
            header_crc32=int(stored["header_crc32"], 16),
            fragments={
                label: StoredFragment(str(each["dtype"]), int(each["crc32"], 16))
                for label, each in stored["fragments"].items()
            },
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest of one checkpoint."""

    step: int
    """0 in frozen weights."""

    attempt: str
    """The job and the number of its save, which no other checkpoint has."""

    created: str
    """When, in UTC."""

    versions: Mapping[str, str]
    """Of Python and the libraries that wrote it."""

    files: Mapping[str, StoredFile]
    """By name, in the order of the ranks."""

    base: str | None
    """The directory beside this one that holds the frozen weights."""

    state: Mapping[str, Any]
    """The run's own."""

    def to_bytes(self) -> bytes:
        """The file's content; its last field is the CRC-32 of the others."""
        content = {
            "format": WITH_COLUMNS if self._has_columns else FORMAT,
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "files": {name: file.to_json() for name, file in self.files.items()},
        }
        content["crc32"] = _hex(zlib.crc32(_canonical(content)))
        return json.dumps(content, indent=1).encode()

    @property
    def _has_columns(self) -> bool:
        labels = (label for file in self.files.values() for label in file.fragments)
        parsed = (parse_label(label) for label in labels)
        return any(each is not None and each.columns is not None for each in parsed)

    def same_content(self, other: "Manifest") -> bool:
        """Whether both hold the same tensors and the same state, whoever wrote them and when."""
        return (self.step, self.base, self.files) == (other.step, other.base, other.files) and (
            _canonical(self.state) == _canonical(other.state)
        )

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """The manifest in `directory`.

        Raises:
            CheckpointError: there is none, or it is not as it was written, or names files that a
                checkpoint can't have.
        """
        path = directory / MANIFEST
        content = _parse(path)
        if content.get("format") not in (FORMAT, WITH_COLUMNS):
            raise CheckpointError(
                f"{path} has format {content.get('format')!r}; this version of the program reads"
                f" formats {FORMAT} and {WITH_COLUMNS}"
            )
        checksum = content.pop("crc32", None)
        if checksum != _hex(zlib.crc32(_canonical(content))):
            raise CheckpointError(f"{path} is damaged: it is not what its CRC-32 says")
        del content["format"]
        strange = content.keys() ^ {field.name for field in fields(cls)}
        if strange:
            raise CheckpointError(f"{path} lacks or has too much: {', '.join(sorted(strange))}")
        _check_fields(path, content)
        try:
            files = {name: StoredFile.from_json(file) for name, file in content["files"].items()}
            return cls(**{**content, "files": files})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is no manifest: {error!r}") from error


def now() -> str:
    """The time in UTC, as a manifest has it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def library_versions() -> dict[str, str]:
    """Of what a checkpoint's meaning may depend on."""
    libraries = ("torch", "transformers", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in libraries}}


def _parse(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: {path.parent} is no whole checkpoint")
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path} is no manifest: it has more than {MAX_BYTES:,} bytes")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no manifest: {str(error)[:200]}") from error
    if type(content) is not dict:
        raise CheckpointError(f"{path} is no manifest: it holds no mapping")
    return content


def _check_fields(path: Path, content: Mapping[str, Any]) -> None:
    for name, kind in TYPES.items():
        if type(content[name]) is not kind:
            raise CheckpointError(f"{path} is no manifest: {name} is {content[name]!r}"[:300])
    files, base = content["files"], content["base"]
    if not files:
        raise CheckpointError(f"{path} names no files")
    expected = [file_name(rank, len(files)) for rank in range(len(files))]
    for name in files:
        if name not in expected:
            raise CheckpointError(
                f"{path} names the file {name!r}; those of a checkpoint of {len(files)} processes"
                f" are {file_name(0, len(files))} and so on"
            )
    if base is not None and not (type(base) is str and is_base_name(base)):
        raise CheckpointError(f"{path} names {base!r}, which is no directory of frozen weights")


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _hex(checksum: int) -> str:
    return f"{checksum:08x}"
