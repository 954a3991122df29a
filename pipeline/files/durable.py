"""Writing that a power failure can't undo."""

import os
import shutil
from pathlib import Path


def sync_directory(path: Path) -> None:
    """Put the names in a directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Put the content of a file on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Make a file whose content is on the disk; its name is not yet."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def rename_durably(source: Path, target: Path) -> None:
    """Give a file or directory its name, for good."""
    source.rename(target)
    sync_directory(target.parent)


def replace_durably(path: Path, content: bytes, *, temporary: Path) -> None:
    """`path` has the old content or the new one, whatever happens; `temporary` is beside it."""
    write_durably(temporary, content)
    temporary.replace(path)
    sync_directory(path.parent)


def publish(path: Path, content: bytes) -> None:
    """Make a small file that other processes see whole or not at all; not for ever."""
    temporary = path.with_name(f"{path.name}.partial")
    temporary.write_bytes(content)
    temporary.replace(path)


def discard(path: Path) -> None:
    """Remove a file or directory as far as the system lets us; what stays does no harm."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def settle(directory: Path) -> None:
    """Put all files below a directory on the disk, as readable as files that Python makes here.

    Libraries that write through a temporary file leave it readable by its owner alone.
    """
    probe = directory / ".mode"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for path in directory.rglob("*"):
        if path.is_dir():
            sync_directory(path)
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fchmod(descriptor, mode & 0o777)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_directory(directory)
