"""Frozen weights in a directory of checkpoints: whether they are still as they were left."""

from collections.abc import Mapping
from pathlib import Path

Traces = Mapping[str, tuple[int, int, int]]
"""Of a directory: by the name of each file its inode, its size and when it was last changed."""


def traces(directory: Path) -> Traces:
    """What the file system says of each file, without reading one; nothing where there is none.

    Lost, cut off, replaced or overwritten files leave other traces; what a disk does to them by
    itself leaves none, and is found where a checkpoint is verified.
    """
    try:
        found = {path.name: path.stat() for path in directory.iterdir()}
    except OSError:
        return {}
    return {name: (each.st_ino, each.st_size, each.st_mtime_ns) for name, each in found.items()}
