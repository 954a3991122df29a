"""A simulated loss of power, which loses everything that was not synced.

A recorded process logs what it syncs and renames. Afterwards `lose_power` reduces a directory to
what is certainly on the disk:

- a file that was not synced is empty;
- a rename, or a new name, that was not followed by syncing the directory did not happen;
- a deleted directory may exist again, but without its files.
"""

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any


def record(journal: Path, *, syncs: bool = True) -> None:
    """Log what this process syncs and renames from now on, or disable syncing."""
    journal.mkdir(exist_ok=True)
    log_file = os.open(journal / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    rename, replace, fsync = os.rename, os.replace, os.fsync

    def log_operation(**operation: Any) -> None:
        os.write(log_file, json.dumps(operation).encode() + b"\n")

    def keep(source: str) -> str:
        """Link a file, so that its inode is not reused."""
        link = journal / f"{os.getpid()}-{len(list(journal.iterdir()))}"
        os.link(source, link)
        return str(link)

    def recorded_fsync(file: int) -> None:
        if not syncs:
            return
        fsync(file)
        status = os.fstat(file)
        if stat.S_ISDIR(status.st_mode):
            log_operation(synced=status.st_ino, names=os.listdir(file))  # a descriptor
        else:
            keep(str(Path(f"/proc/self/fd/{file}").readlink()))
            log_operation(synced=status.st_ino)

    def recorded_rename(source: Path, target: Path) -> None:
        overwritten = keep(str(target)) if Path(target).is_file() else None
        rename(source, target)
        log_operation(source=str(source), target=str(target), overwritten=overwritten)

    def recorded_replace(source: Path, target: Path) -> None:
        overwritten = keep(str(target)) if Path(target).is_file() else None
        replace(source, target)
        log_operation(source=str(source), target=str(target), overwritten=overwritten)

    os.rename, os.replace, os.fsync = recorded_rename, recorded_replace, recorded_fsync


def lose_power(root: Path, journal: Path) -> None:
    """Reduce `root` to what is certainly on the disk."""
    operations = [json.loads(line) for line in (journal / "log").read_text().splitlines()]
    _undo_renames(operations)
    listed = {op["synced"]: op["names"] for op in operations if "names" in op}
    synced = {op["synced"] for op in operations if "synced" in op}
    for path in sorted(root.rglob("*"), reverse=True):
        if path.is_file() and path.stat().st_ino not in synced:
            path.write_bytes(b"")
    for directory in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        if not directory.exists():
            continue
        for path in directory.iterdir():
            if path.name not in listed.get(directory.stat().st_ino, ()):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _undo_renames(operations: list[dict[str, Any]]) -> None:
    for index, operation in reversed(list(enumerate(operations))):
        if "target" not in operation:
            continue
        source, target = Path(operation["source"]), Path(operation["target"])
        parent = target.parent.stat().st_ino if target.parent.exists() else None
        if any(later.get("synced") == parent for later in operations[index:]):
            continue
        if target.exists():
            source.parent.mkdir(exist_ok=True)
            target.rename(source)
        elif source.name.startswith("step_"):
            source.mkdir()
        if operation["overwritten"] is not None:
            os.link(operation["overwritten"], target)
