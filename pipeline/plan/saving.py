"""What a plan says of checkpoints: their bytes, where they go, and how long that takes."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pipeline.budget.checkpoint import checkpoint_bytes
from pipeline.files.own_disk import names_a_variable
from pipeline.plan.estimate import in_words
from pipeline.plan.memory import origins_of
from pipeline.plan.plan import Plan
from pipeline.plan.stage import Stage

ON_A_DISK = 2
"""Checkpoints that a machine has of its processes on its own disk, at most."""

BYTES_A_SECOND = 1e9
"""Of each machine to the run's directory, for want of a measurement: 10 Gbit/s, nearly."""


def saving(plan: Plan, stage: Stage) -> Iterator[str]:
    """Sentences on the checkpoints of a step that is to run; none where their size is not known."""
    config = plan.configs[stage.name]
    total = checkpoint_bytes(config, plan.machine, origins_of(plan.configs))
    if total is None:
        return
    every = config.save_interval
    when = "when a signal ends the run"
    if every is not None:
        when = f"every {config.save_every}" + (" steps" if every.steps is not None else "")
    yield f"{in_bytes(total)}, {when}"
    place = config.local_checkpoints
    if place is None:
        return
    own = total * plan.machine.processes / plan.machine.world
    yield (
        f"on each machine {in_bytes(own)} to {place}, at most {ON_A_DISK} there, and from there to"
        f" the output directory: {in_words(own / BYTES_A_SECOND)} at 1 GB/s"
    )
    free = _free_bytes(place)
    if free is not None and free < ON_A_DISK * own:
        yield (
            f"{place} has {in_bytes(free)} free on this machine, too little for {ON_A_DISK}: what"
            " does not fit goes straight there"
        )


def in_bytes(count: float) -> str:
    """`512 kB`, `38.2 MB`, `1.05 GB`, in powers of ten, as disks are sold."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count / 1e3:.3g} kB"


def _free_bytes(place: str) -> int | None:
    """Free bytes where the directory will be; None where another machine's variable names it."""
    path = Path(os.path.expandvars(Path(place).expanduser()))
    if names_a_variable(str(path)):
        return None
    nearest = next((each for each in (path, *path.parents) if each.exists()), None)
    return None if nearest is None else shutil.disk_usage(nearest).free
