"""The checkpoints of a run that was healthy, to which it may go back."""

from pathlib import Path

from pipeline.engine.checkpoint.layout import step_of, steps_in
from pipeline.engine.checkpoint.manifest import Manifest
from pipeline.errors import CheckpointError


def healthy_up_to(root: Path, step: int) -> list[Path]:
    """The checkpoints up to that step that were healthy when they were saved, newest first."""
    return [path for path in steps_in(root) if (step_of(path) or 0) <= step and is_healthy(path)]


def needed_to_go_back(root: Path, step: int, *, margin: int) -> list[Path]:
    """The healthy checkpoints that a run which stands after `step` may go back to.

    It goes back by `margin` steps at least, from wherever it will be: to the newest healthy one of
    those that are so far behind by now, or to a later one.
    """
    healthy = healthy_up_to(root, step)
    behind = [path for path in healthy if (step_of(path) or 0) <= step - margin]
    return [path for path in healthy if path not in behind[1:]]


def is_healthy(path: Path) -> bool:
    """Whether the run called itself healthy when it saved that checkpoint."""
    try:
        return Manifest.read(path).state.get("healthy") is True
    except CheckpointError:
        return False
