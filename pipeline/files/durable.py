"""Atomic writes: even after a crash or power failure, a file contains its old or new content."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.system.errors import ConfigError, require


def sync(path: Path, *, mode: int | None = None) -> None:
    """Flush a file's content, or a directory's entries, to disk; set the file's mode if given."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if mode is not None:
            os.fchmod(descriptor, mode)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Create a file and flush its content, but not its directory entry, to disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file or directory durably."""
    source.rename(target)
    sync(target.parent)


def replace_durably(path: Path, content: bytes, *, temporary: Path | None = None) -> None:
    """Replace the content of `path` atomically, using `temporary` or `PATH.partial` next to it."""
    temporary = temporary or path.with_name(f"{path.name}.partial")
    write_durably(temporary, content)
    temporary.replace(path)
    sync(path.parent)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a small file atomically, but without flushing it to disk."""
    temporary = path.with_name(f"{path.name}.partial")
    temporary.write_bytes(content)
    temporary.replace(path)


def discard(path: Path) -> None:
    """Remove a file or directory on a best-effort basis; leftovers are harmless."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def sync_tree(directory: Path) -> None:
    """Give all files below a directory default permissions, and flush them to disk.

    Libraries that write through a temporary file leave it readable only by its owner.
    """
    probe = directory / ".mode"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for path in directory.rglob("*"):
        sync(path, mode=None if path.is_dir() else mode & 0o777)
    sync(directory)


def check_writable(path: Path, *inputs: str | Path, option: str) -> None:
    """Check that a file can probably be written at `path`, without creating anything.

    Call it before computing what the file will contain.

    Raises:
        ConfigError: `path`, set by `option`, is a directory or one of the files `inputs`, or its
            parent is a file or not writable.
    """
    sources = [Path(file).expanduser().resolve() for file in inputs]
    require(path.resolve() not in sources, f"{option} {path} is also an input; pass another name")
    require(not path.is_dir(), f"{option} {path} is a directory; pass a file name")
    ancestor = next(parent for parent in path.absolute().parents if parent.exists())
    problem = f"{option} {path} can't be written: {ancestor} is"
    require(ancestor.is_dir(), f"{problem} a file")
    require(os.access(ancestor, os.W_OK | os.X_OK), f"{problem} not writable")


def write_output(texts: Mapping[Path, str], *, option: str) -> None:
    """Write files atomically: each is unchanged, or missing, until its new content is complete.

    A killed process or a power failure leaves at most `<name>.partial` files, which the next call
    overwrites. Files are renamed once all contents are on disk. Missing directories are created.

    Raises:
        ConfigError: one of the files, set by `option`, can't be written. Their content, which may
            have taken hours to compute, is then in a temporary directory that the message names.
    """
    partial_paths = {path: path.with_name(f"{path.name}.partial") for path in texts}
    path = next(iter(texts))
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(partial_paths[path], text.encode())
        for path in texts:
            partial_paths[path].replace(path)
        for directory in {path.parent for path in texts}:
            sync(directory)
    except OSError as error:
        for partial in partial_paths.values():  # a full disk needs the space
            with suppress(OSError):
                partial.unlink()
        problem = f"{option} {path} can't be written: {error.strerror or error}"
        raise ConfigError(problem + _rescue(texts)) from error


def _rescue(texts: Mapping[Path, str]) -> str:
    """Write files to a new temporary directory; return the end of a sentence that names it."""
    directory: Path | None = None
    try:
        directory = Path(tempfile.mkdtemp(prefix="rlhf-"))
        for path, text in texts.items():
            (directory / path.name).write_text(text, encoding="utf-8")
    except OSError:  # it may be on the same full disk
        if directory is not None:
            discard(directory)
        return ""
    return f"; its content is in {directory}"


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Format rows as JSON, one per line."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
