"""Learning-rate schedules as functions of the step."""

import math

from pipeline.config import OptimConfig


def lr_factor(step: int, *, total_steps: int, optim: OptimConfig) -> float:
    """Share of the peak learning rate that optimizer step `step` (from 0) uses.

    Linear warm-up over the first `warmup_ratio` of the steps - the first step already moves, at
    1 / warm-up steps of the peak - then the schedule falls from 1 to `final_lr_ratio`.
    """
    warmup_steps = math.ceil(optim.warmup_ratio * total_steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    shapes = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }
    return optim.final_lr_ratio + (1.0 - optim.final_lr_ratio) * shapes[optim.schedule]
