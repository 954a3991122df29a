"""The learning rate of a step, as the settings give it."""

import math
from dataclasses import replace

from pipeline.config import OptimConfig
from pipeline.config.optim import SCHEDULES, Span


def lr_factor(step: int, *, total_steps: int, optim: OptimConfig) -> float:
    """Share of the peak learning rate that optimizer step `step` (from 0) uses.

    `step` counts the steps that were applied: the rate waits for one that was skipped.
    """
    warmup = optim.warmup_steps
    if warmup is None:
        warmup = math.ceil(optim.warmup_ratio * total_steps)
    span = Span(total_steps=total_steps, warmup_steps=warmup, final_ratio=optim.final_lr_ratio)
    return SCHEDULES[optim.schedule](step, span, **optim.schedule_params)


def goes_on_alike(total_steps: int, longer: int, *, optim: OptimConfig) -> bool:
    """True if a longer run begins with the same learning rates.

    So are schedules without an end, with no warm-up or a fixed number of warm-up steps.
    """
    if optim.warmup_steps is None and optim.warmup_ratio:
        return False
    return all(
        lr_factor(step, total_steps=total_steps, optim=optim)
        == lr_factor(step, total_steps=longer, optim=optim)
        for step in range(total_steps)
    )


def length_dependence(optim: OptimConfig) -> str:
    """The reason why learning rates depend on the number of steps; empty if they do not.

    A run without it can be made longer at any time.
    """
    if not goes_on_alike(1000, 3001, optim=replace(optim, warmup_steps=0)):
        return f"optim.schedule {optim.schedule} ends with the run"
    if not goes_on_alike(1000, 3001, optim=optim):
        return (
            "optim.warmup_steps is null, so that the warm-up is a share of all steps"
            f" (warmup_ratio {optim.warmup_ratio:g})"
        )
    return ""
