"""From a directory that is written to the newest checkpoint, and the removal of old ones."""

from collections.abc import Collection, Iterable
from pathlib import Path

from pipeline.engine.checkpoint.attempt import Attempt
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.layout import (
    LATEST,
    MANIFEST,
    WRITING,
    step_name,
    step_of,
    steps_in,
)
from pipeline.engine.checkpoint.manifest import Manifest, base_of
from pipeline.engine.checkpoint.removal import remove
from pipeline.errors import CheckpointError
from pipeline.faults import fault_point
from pipeline.files.durable import (
    rename_durably,
    replace_durably,
    sync_directory,
    write_durably,
)


def commit(attempt: Attempt, manifest: Manifest) -> None:
    """Give the directory its name: before that there is no checkpoint, after it there is.

    One that already exists, is whole and holds the same stays; any other gives way.

    Raises:
        OSError: the system can't.
        CheckpointError: what the processes wrote is none; its base is missing, say.
    """
    fault_point("checkpoint.before_manifest")
    write_durably(attempt.directory / MANIFEST, manifest.to_bytes())
    Checkpoint.open(attempt.directory)
    attempt.remove_parts()
    sync_directory(attempt.directory)
    fault_point("checkpoint.before_rename")
    if attempt.target.exists():
        if _holds(attempt.target, manifest):
            attempt.keep_target()
            return
        remove(attempt.target, attempt.name)
    rename_durably(attempt.directory, attempt.target)
    fault_point("checkpoint.after_rename")


def _holds(path: Path, manifest: Manifest) -> bool:
    return verifies(path) and Manifest.read(path).same_content(manifest)


def verifies(path: Path) -> bool:
    """Whether a directory holds a checkpoint, every bit of it as it was saved."""
    try:
        Checkpoint.open(path).verify()
    except CheckpointError:
        return False
    return True


def name_latest(root: Path, step: int, attempt: str) -> None:
    """Have `latest` name that step's directory.

    Raises:
        OSError: the system can't.
    """
    fault_point("checkpoint.before_latest")
    replace_durably(
        root / LATEST,
        f"{step_name(step)}\n".encode(),
        temporary=root / f"{WRITING}{LATEST}-{attempt}",
    )


def prune(
    root: Path,
    step: int,
    *,
    keep_last: int,
    own: Collection[int],
    bases: Iterable[str],
    by: str,
    spared: Collection[Path] = (),
) -> None:
    """Remove the checkpoints up to `step` but the `keep_last` newest, and bases nobody names.

    Those of the steps `own`, which this job wrote, count as they are, others only if they verify:
    the last ones that are left shall be of use. What is after `step` is of a future that this run,
    resumed before it, will write again; until then it stays. So do `bases`, and what is `spared`.
    """
    good = 0
    for path in steps_in(root):
        at = step_of(path) or 0
        if at > step:
            continue
        if good == keep_last:
            if path not in spared:
                remove(path, by)
        elif at in own or verifies(path):
            good += 1
    named = set(bases)
    for path in steps_in(root):
        try:
            base = base_of(path)
        except CheckpointError:
            return  # nobody knows what it needs
        named |= {base} if base else set()
    for path in root.glob("base-*"):
        if path.name not in named:
            remove(path, by)
