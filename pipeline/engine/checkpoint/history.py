"""The checkpoints in a directory: where to resume from, and which ones a rollback needs."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.format import (
    LATEST,
    WRITING,
    Manifest,
    list_steps,
    remove,
    step_name,
)
from pipeline.files.durable import replace_durably
from pipeline.parallel.group import Group
from pipeline.system.errors import CheckpointError
from pipeline.system.faults import fault_point

logger = logging.getLogger(__name__)

ROLLBACK = "rollback.json"


def list_candidates(root: Path) -> list[Path]:
    """List the step directories in the order in which to try them.

    The target of `latest` (by default the newest step) comes first, then earlier steps, newest
    first, and finally later steps, which are left over if a run resumed from an earlier one.
    """
    steps = list_steps(root)
    try:
        latest = root / (root / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return steps
    position = steps.index(latest) if latest in steps else 0
    return steps[position:] + steps[:position]


def find_newest_valid(
    root: Path, world: Group, *, list_paths: Callable[[Path], Sequence[Path]] = list_candidates
) -> Checkpoint | None:
    """Return the first checkpoint that all processes find valid, or None if no checkpoint exists.

    All processes must call this; each verifies some of the files. `list_paths` lists the
    directories to try; the first process's list is used.

    Raises:
        CheckpointError: there are checkpoints, but none is valid.
    """
    skipped: list[str] = []
    for path in world.gather_objects(list_paths(root) if world.rank == 0 else [])[0]:
        checkpoint, problem = None, ""
        try:
            checkpoint = Checkpoint.open(path, rank=world.rank)
            checkpoint.verify(shard=world.rank, num_shards=world.size)
        except CheckpointError as error:
            problem = str(error)
        problems = [reason for reason in world.gather_objects(problem) if reason]
        if checkpoint is not None and not problems:
            return checkpoint
        skipped.append(problems[0])
        logger.warning("%s; skipping this checkpoint", problems[0])
    if skipped:
        raise CheckpointError(
            f"no checkpoint in {root} can be used ({len(skipped)} tried): {skipped[0]}; restore"
            " one, or remove this directory to start over"
        )
    return None


def update_latest(root: Path, step: int) -> None:
    """Point `latest` to the directory of `step`.

    Raises:
        OSError: the file can't be written.
    """
    fault_point("checkpoint.before_latest")
    content = f"{step_name(step)}\n".encode()
    replace_durably(root / LATEST, content, temporary=root / f"{WRITING}{LATEST}")


def list_healthy(root: Path, step: int) -> list[Path]:
    """List the checkpoints up to `step` saved while the run was healthy, newest first."""
    newest = step_name(step)
    return [path for path in list_steps(root) if path.name <= newest and _is_healthy(path)]


def list_rollback_targets(root: Path, step: int, *, margin: int | None) -> list[Path]:
    """List the healthy checkpoints that a rollback after `step` may need.

    A rollback undoes at least `margin` steps, so a future rollback loads the newest healthy
    checkpoint that is already that old, or a later one. If `margin` is None, none are needed.
    """
    if margin is None:
        return []
    healthy = list_healthy(root, step)
    old_enough = [path for path in healthy if path.name <= step_name(step - margin)]
    return [path for path in healthy if path not in old_enough[1:]]


def _is_healthy(path: Path) -> bool:
    try:
        return Manifest.read(path).state.get("healthy") is True
    except CheckpointError:
        return False


@dataclass(frozen=True)
class RollbackRecord:
    """A run's last rollback, recorded before any other change.

    Once it is written, checkpoints of later steps saved before the rollback are invalid, so a run
    that is killed during a rollback resumes as if the rollback were complete.
    """

    count: int
    """Number of rollbacks, including this one."""

    step: int
    """The step of the checkpoint to which the run was rolled back."""

    parts: Mapping[str, Any]
    """States of the parts that are not rolled back, by name."""

    @classmethod
    def read(cls, root: Path) -> "RollbackRecord | None":
        """Read the record in `root`, or return None if there is none.

        Raises:
            CheckpointError: the record can't be read.
        """
        path = root / ROLLBACK
        try:
            return cls(**json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{path} can't be read: {error!r}; restore it, or remove {root} to start over"
            ) from error

    def write(self, root: Path) -> None:
        """Write the record atomically and durably."""
        fault_point("rollback.before_record")
        content = json.dumps(asdict(self)).encode()
        replace_durably(root / ROLLBACK, content, temporary=root / f"{WRITING}{ROLLBACK}")
        fault_point("rollback.after_record")

    def invalidates(self, state: Mapping[str, Any]) -> bool:
        """Return whether the run was rolled back after `state` was saved."""
        return state.get("rollbacks", 0) < self.count

    def remove_later_steps(self, root: Path) -> None:
        """Make the record's checkpoint the newest: point `latest` to it and remove later ones."""
        if (root / LATEST).exists():
            update_latest(root, self.step)
        fault_point("rollback.before_removal")
        for path in list_steps(root):
            if path.name > step_name(self.step):
                remove(path)
