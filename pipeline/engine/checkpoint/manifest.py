"""`manifest.json`: what a checkpoint consists of, and the state that is not a tensor.

A line for each field, in an order: what is asked of many checkpoints comes first, and is read
without the rest. The last line is the CRC-32 of all before it. What a file holds stands in its own
header, of which the manifest has the CRC-32, so that it is short however many tensors there are.
The first format had that in the manifest as well.
"""

import json
import platform
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.engine.checkpoint.layout import MANIFEST, file_name, is_base_name
from pipeline.errors import CheckpointError

FORMAT = 2

READABLE = (1, 2)

MAX_BYTES = 2**30

HEAD_BYTES = 4096
"""Bytes from the beginning that hold the first fields."""

_END = re.compile(rb',\n"crc32": "([0-9a-f]{8})"\n}\n?', re.IGNORECASE)

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

    fragments: Mapping[str, StoredFragment] | None = None
    """By label, `key|start:stop`; None where the file's header tells."""

    def to_json(self) -> dict[str, Any]:
        """The manifest's words for it."""
        return {"bytes": self.nbytes, "header_crc32": f"{self.header_crc32:08x}"}

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
            }
            if "fragments" in stored
            else None,
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest of one checkpoint."""

    step: int
    """The optimizer step after which it was saved; 0 of frozen weights."""

    attempt: str
    """The job and the number of its save, which no other checkpoint has."""

    created: str
    """When, in UTC."""

    base: str | None
    """The directory beside this one that holds the frozen weights."""

    versions: Mapping[str, str]
    """Versions of Python and the libraries that wrote it, by name."""

    files: Mapping[str, StoredFile]
    """The processes' files by name, in the order of the ranks."""

    state: Mapping[str, Any]
    """The run's own state, as `save` was given it."""

    def to_bytes(self) -> bytes:
        """The file's content."""
        content = {
            "format": FORMAT,
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "files": {name: file.to_json() for name, file in self.files.items()},
        }
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in content.items()]
        text = ("{\n" + ",\n".join(lines)).encode()
        return text + f',\n"crc32": "{zlib.crc32(text):08x}"\n}}\n'.encode()

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
        raw = _read(path)
        content = _parse(path, raw)
        if content.get("format") not in READABLE:
            raise CheckpointError(
                f"{path} has format {content.get('format')!r}; this version of the program reads"
                f" formats {' and '.join(map(str, READABLE))}"
            )
        if not _is_undamaged(raw, content):
            raise CheckpointError(f"{path} is damaged: it is not what its CRC-32 says")
        content.pop("crc32", None)
        del content["format"]
        strange = content.keys() ^ {field.name for field in fields(cls)}
        if strange:
            raise CheckpointError(f"{path} lacks or has too much: {', '.join(sorted(strange))}")
        _check_fields(path, content)
        try:
            files = {name: StoredFile.from_json(file) for name, file in content["files"].items()}
            return cls(**{**content, "files": files})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is not a manifest: {error!r}") from error


def now() -> str:
    """The time in UTC, as a manifest has it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def library_versions() -> dict[str, str]:
    """The versions of the libraries that a checkpoint's meaning may depend on."""
    libraries = ("torch", "transformers", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in libraries}}


def base_of(directory: Path) -> str | None:
    """What the manifest in `directory` says of its base, read alone where that comes first.

    Raises:
        CheckpointError: it can't be found there.
    """
    head = _head(directory)
    return head["base"] if "base" in head else Manifest.read(directory).base


def attempt_of(directory: Path) -> str:
    """Which attempt wrote the manifest in `directory`, read alone where that comes first.

    Raises:
        CheckpointError: it can't be found there.
    """
    head = _head(directory)
    return head["attempt"] if "attempt" in head else Manifest.read(directory).attempt


def _head(directory: Path) -> dict[str, Any]:
    """The first fields, as far as each is a line of the file's beginning."""
    try:
        with (directory / MANIFEST).open("rb") as file:
            lines = file.read(HEAD_BYTES).split(b",\n")
        return json.loads(b"{" + b",".join(lines[:-1])[1:] + b"}")
    except (OSError, ValueError):
        return {}


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: {path.parent} is not a whole checkpoint")
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path} is not a manifest: it has more than {MAX_BYTES:,} bytes")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from error


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a manifest: {str(error)[:200]}") from error
    if type(content) is not dict:
        raise CheckpointError(f"{path} is not a manifest: it holds no mapping")
    return content


def _is_undamaged(raw: bytes, content: Mapping[str, Any]) -> bool:
    """Whether the last field is the CRC-32 of the others' bytes.

    In the first format it is that of a form that was made of them.
    """
    if content["format"] == 1:
        others = {name: value for name, value in content.items() if name != "crc32"}
        return content.get("crc32") == f"{zlib.crc32(_canonical(others)):08x}"
    end = _END.search(raw, max(0, len(raw) - 64))
    return (
        end is not None
        and end.end() == len(raw)
        and zlib.crc32(memoryview(raw)[: end.start()]) == int(end[1], 16)
    )


def _check_fields(path: Path, content: Mapping[str, Any]) -> None:
    for name, kind in TYPES.items():
        if type(content[name]) is not kind:
            raise CheckpointError(f"{path} is not a manifest: {name} is {content[name]!r}"[:300])
    files, base = content["files"], content["base"]
    if not files:
        raise CheckpointError(f"{path} names no files")
    expected = {file_name(rank, len(files)) for rank in range(len(files))}
    for name in files:
        if name not in expected:
            raise CheckpointError(
                f"{path} names the file {name!r}; those of a checkpoint of {len(files)} processes"
                f" are {file_name(0, len(files))} and so on"
            )
    if base is not None and not (type(base) is str and is_base_name(base)):
        raise CheckpointError(f"{path} names {base!r}, which is not a directory of frozen weights")


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
