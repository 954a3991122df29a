"""Checks of every step that runs through pipeline stages."""

import shutil
from pathlib import Path

from pipeline.budget.machine import Machine
from pipeline.budget.memory import step_memory
from pipeline.config import StepConfig


def lose_the_end(out: Path, *, last: int) -> None:
    """Leave of a finished run what one has that was killed before its last step."""
    (out / "result.json").unlink()
    shutil.rmtree(out / "checkpoints" / f"step_{last:08d}")


def require_less_memory(staged: StepConfig, alone: StepConfig) -> None:
    """The plan counts less for a stage of two than for one process."""
    of_stage = step_memory(staged, machine=Machine(2, 2, None, 2**34, "it"))
    of_whole = step_memory(alone, machine=Machine(1, 1, None, 2**34, "it"))
    assert of_stage.peak("device") < of_whole.peak("device")
