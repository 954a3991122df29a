"""Start a run with the weights and optimizer state of an earlier one."""

import logging
from pathlib import Path

from pipeline.engine.checkpoint.history import find_newest_valid
from pipeline.engine.checkpoint.state import load
from pipeline.engine.engine import Engine
from pipeline.parallel.group import Group
from pipeline.plan.output import CHECKPOINTS
from pipeline.system.errors import CheckpointError

logger = logging.getLogger(__name__)

MODEL = "model"
"""Name of the model in checkpoints of steps that train a single model."""


def warm_start(engine: Engine, directory: Path, world: Group) -> None:
    """Load weights and moments from the newest checkpoint of the run in `directory`.

    All processes must call this. The optimizer continues as if it had taken the earlier steps; the
    learning-rate schedule restarts.

    Raises:
        CheckpointError: there is no usable checkpoint, or it is from a different model.
    """
    checkpoint = find_newest_valid(directory / CHECKPOINTS, world)
    if checkpoint is None or MODEL not in checkpoint.state["engines"]:
        raise CheckpointError(
            f"warm_start {directory} has no usable step 0 checkpoint; use the output directory of a"
            " step 0 run"
        )
    load(engine, MODEL, checkpoint, checkpoint.state["engines"][MODEL])
    engine.steps = 0
    logger.info(
        "warm start from %s (step %d): loaded the weights and optimizer state only; data and its"
        " order, batch size, sequence length, learning-rate schedule and seed come from this run",
        checkpoint.path,
        checkpoint.step,
    )
