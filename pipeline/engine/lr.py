"""The learning rate of a step, as the settings give it."""

import math

from pipeline.config import OptimConfig
from pipeline.config.schedule_params import keyword_only
from pipeline.config.schedules import SCHEDULES, Span


def lr_factor(step: int, *, total_steps: int, optim: OptimConfig) -> float:
    """Share of the peak learning rate that optimizer step `step` (from 0) uses.

    `step` counts the steps that were applied: the rate waits for one that was skipped.
    """
    function = SCHEDULES[optim.schedule].share
    span = Span(
        total_steps=total_steps,
        warmup_steps=warmup_steps(total_steps, optim),
        final_ratio=optim.final_lr_ratio,
    )
    names = keyword_only(function)
    return function(step, span, **{k: v for k, v in optim.schedule_params.items() if k in names})


def momentum(step: int, *, optim: OptimConfig) -> float | None:
    """The first of Adam's betas at step `step`; None where it is `optim.betas[0]` throughout."""
    function = SCHEDULES[optim.schedule].momentum
    if function is None:
        return None
    names = keyword_only(function)
    return function(step, **{k: v for k, v in optim.schedule_params.items() if k in names})


def warmup_steps(total_steps: int, optim: OptimConfig) -> int:
    """Steps of the warm-up: `warmup_steps`, else the ratio of the run, rounded up."""
    if optim.warmup_steps is not None:
        return optim.warmup_steps
    return math.ceil(optim.warmup_ratio * total_steps)
