"""A run that goes back to an earlier checkpoint of its own, and stays there whenever it is killed.

Which checkpoint, and what does not go back with it, is noted before anything else happens. From
then on the checkpoints after it, and all of a run that had gone back less often, count no more.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.engine.checkpoint.commit import name_latest
from pipeline.engine.checkpoint.layout import LATEST, WRITING, step_of, steps_in
from pipeline.engine.checkpoint.removal import remove
from pipeline.errors import CheckpointError
from pipeline.faults import fault_point
from pipeline.files.durable import replace_durably

NOTE = "went_back.json"


@dataclass(frozen=True)
class Return:
    """The last time that a run went back."""

    count: int
    """How often it has, this time included."""

    step: int
    """The step of the checkpoint that the run went back to."""

    parts: Mapping[str, Any]
    """The states of the parts that did not go back, by name."""

    @classmethod
    def read(cls, root: Path) -> "Return | None":
        """The note in `root`; None where there is none.

        Raises:
            CheckpointError: it can't be read.
        """
        path = root / NOTE
        try:
            note = json.loads(path.read_bytes())
            return cls(count=int(note["count"]), step=int(note["step"]), parts=note["parts"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} can't be read: {error!r}; restore it, or pass --overwrite to start again"
            ) from error

    def write(self, root: Path) -> None:
        """Leave the note, whole or not at all; durable at return."""
        fault_point("going_back.before_note")
        content = json.dumps(asdict(self)).encode()
        replace_durably(root / NOTE, content, temporary=root / f"{WRITING}{NOTE}")
        fault_point("going_back.after_note")

    def is_behind(self, state: Mapping[str, Any]) -> bool:
        """Whether the run has gone back since that state was saved."""
        return state.get("returns", 0) < self.count

    def discard_what_follows(self, root: Path, *, by: str) -> None:
        """Make the checkpoint the newest: `latest` names it, and those after it are removed."""
        if (root / LATEST).exists():
            name_latest(root, self.step, by)
        fault_point("going_back.before_removal")
        for path in steps_in(root):
            if (step_of(path) or 0) > self.step:
                remove(path, by)


def forget_return(root: Path) -> None:
    """Remove the note of a run that begins again."""
    (root / NOTE).unlink(missing_ok=True)
