"""Helpers for tests of ZeRO stages and pipeline stages in every step."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.budget.machine import Machine
from pipeline.budget.memory import step_memory
from pipeline.config import StepConfig
from pipeline.parallel.mesh import split_mesh
from pipeline.plan.output import CHECKPOINTS


def train_sharded(train: Callable[[Any], None], config: Any) -> None:
    """Train on a mesh of all processes, as configured."""
    parallel = config.parallel
    with split_mesh(
        replicas=parallel.replicas, pp=parallel.pp, tp=parallel.tp, timeout_seconds=60.0
    ):
        train(config)


def hash_weights(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of weights below `directory`."""
    hashes = {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(directory.rglob("*.safetensors"))
        if CHECKPOINTS not in file.parts  # these are sharded according to the stage
    }
    assert hashes
    return hashes


def remove_last_checkpoint(out: Path, *, last: int) -> None:
    """Turn a finished run into one that was killed before its last step."""
    (out / "result.json").unlink()
    shutil.rmtree(out / "checkpoints" / f"step_{last:08d}")


def require_less_memory(staged: StepConfig, single: StepConfig) -> None:
    """Assert that the plan has less memory for one of two stages than for one process."""
    stage_memory = step_memory(staged, machine=Machine(2, 2, None, 2**34, "it"))
    full_memory = step_memory(single, machine=Machine(1, 1, None, 2**34, "it"))
    assert stage_memory.peak("device") < full_memory.peak("device")
