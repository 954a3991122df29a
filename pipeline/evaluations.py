"""When a step evaluates while it trains: often enough to see a turn for the worse, and cheaply."""

import math

EVALUATIONS = 10
"""Evaluations of a run, its end included, where they take little of its work."""

SHARE = 0.08
"""Of a run's work that its evaluations take at most, the first and the last one not counted."""

FORWARD_SHARE = 1 / 3
"""Of a training step's work that its forward pass is; the backward pass is twice as much."""


def evaluation_interval(every: int | None, *, total_steps: int, cost: float) -> int:
    """Steps between evaluations; the last step is evaluated in any case.

    It follows from settings and rows alone, never from a clock: which weights are the best must not
    depend on how fast a machine is.

    Args:
        every: the setting `eval_every`: a number of steps, 0 for the last step alone, None to
            choose.
        total_steps: of the run.
        cost: work of one evaluation, in training steps.
    """
    if every == 0:
        return total_steps
    if every is not None:
        return every
    affordable = int(SHARE * total_steps / max(cost, 1e-9))
    return math.ceil(total_steps / max(1, min(EVALUATIONS, affordable)))
