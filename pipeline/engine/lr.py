"""The learning rate of a step according to the settings."""

import math

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
