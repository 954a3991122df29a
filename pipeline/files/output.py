"""Files that a command makes for its user: whole or not there, and refused before the work."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.files.durable import sync_directory, write_durably
from pipeline.system.errors import ConfigError


def check_output(path: Path, *, option: str) -> None:
    """Return if a file can be written there, as far as that shows; makes nothing.

    Called before the work whose result the file will hold.

    Args:
        path: of the file, which may be there already.
        option: that names it, for messages.

    Raises:
        ConfigError: it is a directory, or lies where nothing can be made.
    """
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a directory; give the name of a file")
    above = path.absolute().parent
    while not above.exists():
        above = above.parent
    if not above.is_dir():
        raise ConfigError(f"{option} {path} can't be written: {above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path} can't be written: {above} is not yours to write to")


def write_output(texts: Mapping[Path, str], *, option: str) -> None:
    """Write files, each of which has its old content, or none, until it has all of the new one.

    A process that is killed, or a power failure, leaves at most `<name>.partial` beside them, which
    the next call writes anew. No name changes before all contents are on the disk.

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
            sync_directory(directory)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{option} {path} can't be written: {reason}") from error


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as JSON, one a line."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
