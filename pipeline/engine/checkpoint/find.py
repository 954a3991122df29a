"""Which checkpoint to go on from."""

from pathlib import Path

from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.layout import LATEST, step_of, steps_in
from pipeline.errors import CheckpointError


def candidates(root: Path) -> list[Path]:
    """The directories of steps in the order in which to try them.

    What `latest` names comes first, then the steps before it, newest first, and last those after
    it, which a run that was resumed at an earlier step has left behind. Without a `latest` that
    names a directory: newest first.
    """
    steps = steps_in(root)
    latest = _latest(root)
    if latest not in steps:
        return steps
    position = steps.index(latest)
    return steps[position:] + steps[:position]


def newest(root: Path, *, verify: bool = True) -> tuple[Checkpoint | None, list[str]]:
    """The first candidate that opens and, unless `verify` is off, verifies.

    And one sentence for each that was passed over.
    """
    passed_over: list[str] = []
    for path in candidates(root):
        try:
            checkpoint = Checkpoint.open(path)
            if verify:
                checkpoint.verify()
        except CheckpointError as error:
            passed_over.append(f"{path.name} can't be used: {error}")
        else:
            return checkpoint, passed_over
    return None, passed_over


def _latest(root: Path) -> Path | None:
    try:
        path = root / (root / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return path if step_of(path) is not None else None
