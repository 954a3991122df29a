"""The size and interval of checkpoints, for a plan."""

from collections.abc import Iterator

from pipeline.budget.checkpoint import checkpoint_bytes
from pipeline.plan.memory import origins_of
from pipeline.plan.plan import Plan
from pipeline.plan.stage import Stage


def saving(plan: Plan, stage: Stage) -> Iterator[str]:
    """A sentence on the checkpoints of a step; none if their size is unknown."""
    config = plan.configs[stage.name]
    total = checkpoint_bytes(config, plan.machine, origins_of(plan.configs))
    if total is None:
        return
    every = config.save_interval
    when = "when a signal ends the run"
    if every is not None:
        when = f"every {config.save_every}" + (" steps" if every.steps is not None else "")
    yield f"{in_bytes(total)}, {when}"


def in_bytes(count: float) -> str:
    """`512 kB`, `38.2 MB`, `1.05 GB`, in powers of ten, as disks are sold."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count / 1e3:.3g} kB"
