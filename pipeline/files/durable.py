"""Files whose old or new content survives a kill and a power failure."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.system.errors import ConfigError


def sync(path: Path, *, mode: int | None = None) -> None:
    """Flush a file's content, or a directory's names, to the disk; set the file's mode if given."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if mode is not None:
            os.fchmod(descriptor, mode)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Create a file and flush its content, but not its name, to the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file or directory durably."""
    source.rename(target)
    sync(target.parent)


def replace_durably(path: Path, content: bytes, *, temporary: Path | None = None) -> None:
    """Replace the content of `path` atomically; `temporary`, or `PATH.partial`, is next to it."""
    temporary = temporary or path.with_name(f"{path.name}.partial")
    write_durably(temporary, content)
    temporary.replace(path)
    sync(path.parent)


def publish(path: Path, content: bytes) -> None:
    """Write a small file that other processes see complete or not at all, without a flush."""
    temporary = path.with_name(f"{path.name}.partial")
    temporary.write_bytes(content)
    temporary.replace(path)


def discard(path: Path) -> None:
    """Remove a file or directory as far as possible; leftovers are harmless."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def settle(directory: Path) -> None:
    """Flush all files below a directory to the disk, with the default permissions.

    Libraries that write through a temporary file leave it readable by its owner alone.
    """
    probe = directory / ".mode"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for path in directory.rglob("*"):
        sync(path, mode=None if path.is_dir() else mode & 0o777)
    sync(directory)


def check_output(path: Path, *, option: str) -> None:
    """Return if a file can probably be written there; creates nothing.

    Called before the work whose result the file will hold.

    Args:
        path: of the file, which may be there already.
        option: that names it, for messages.

    Raises:
        ConfigError: it is a directory, or is in a place that can't be written.
    """
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a directory; give the name of a file")
    above = path.absolute().parent
    while not above.exists():
        above = above.parent
    if not above.is_dir():
        raise ConfigError(f"{option} {path} can't be written: {above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path} can't be written: {above} is not writable")


def write_output(texts: Mapping[Path, str], *, option: str) -> None:
    """Write files, each of which has its old content, or none, until it has all of the new one.

    A killed process or a power failure leaves at most `<name>.partial` next to them, which the next
    call writes again. No name changes before all contents are on the disk.

    Args:
        texts: by file; missing directories are made.
        option: that names them, for messages.

    Raises:
        ConfigError: one of them can't be written.
    """
    partial = {path: path.with_name(f"{path.name}.partial") for path in texts}
    path = next(iter(texts))
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(partial[path], text.encode())
        for path in texts:
            partial[path].replace(path)
        for directory in {path.parent for path in texts}:
            sync(directory)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{option} {path} can't be written: {reason}") from error


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as JSON, one a line."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
