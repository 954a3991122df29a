"""Directories that go: out of sight at once, and deleted after that."""

from pathlib import Path

from pipeline.engine.checkpoint.layout import REMOVING, WRITING
from pipeline.faults import fault_point
from pipeline.files.durable import discard


def remove(path: Path, by: str) -> None:
    """Take a directory out of sight at once, then delete it; a failure leaves it there."""
    hidden = path.with_name(f"{REMOVING}{path.name}-{by}")
    try:
        path.rename(hidden)
        fault_point("checkpoint.during_prune")
    except OSError:
        return
    discard(hidden)


def clean(root: Path, *, but_job: str) -> None:
    """Delete what other jobs left in the making, or on the way out."""
    for path in root.iterdir():
        if path.name.startswith((WRITING, REMOVING)) and f"-{but_job}." not in path.name:
            discard(path)
