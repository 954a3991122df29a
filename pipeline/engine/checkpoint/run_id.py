"""The name that a run has on its machines' disks, in its directory of checkpoints."""

import json
from pathlib import Path

from pipeline.files.durable import replace_durably

RUN_ID = "local.json"
"""There once a state may be on machines' disks."""

REPLACED_ID = "local.replaced.json"
"""Of a run that was overwritten: what it left on the disks is removed by the next one."""


def run_id(root: Path) -> str | None:
    """The name of the run whose checkpoints are in `root`; None where none wrote to such disks."""
    for name in (RUN_ID, REPLACED_ID):
        try:
            return str(json.loads((root / name).read_bytes())["id"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def write_run_id(root: Path, name: str) -> None:
    """Leave the name, for good.

    Raises:
        OSError: the system can't.
    """
    content = json.dumps({"id": name}).encode()
    replace_durably(root / RUN_ID, content, temporary=root / f"{RUN_ID}.partial")


def set_aside_run_id(root: Path) -> None:
    """Leave the name of a run that is to be overwritten for the next one alone."""
    if (root / RUN_ID).is_file():
        (root / RUN_ID).replace(root / REPLACED_ID)


def may_hold_a_state(root: Path) -> bool:
    """Whether a run whose checkpoints go to `root` has saved one, here or on machines' disks."""
    return (root / RUN_ID).is_file() or any(root.glob("step_*"))
