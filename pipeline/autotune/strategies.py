"""Which candidate is tried next: functions of what was measured, with no other state.

So a tuning that was cut off goes on as if it had not been, and the same measurements lead to the
same choices.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from pipeline.autotune.points import Point
from pipeline.autotune.space import Candidate, Space

Strategy = Literal["model", "grid", "random"]

MOST_TRIALS = 24
"""Trials of a step at most, unless another number is given."""


def next_candidate(
    space: Space,
    points: Sequence[Point],
    *,
    strategy: Strategy,
    trials: int,
    seed: int,
    refused: Sequence[Candidate] = (),
    too_large: Sequence[Candidate] = (),
) -> Candidate | None:
    """What to try next; None when enough was tried, or nothing is left.

    The settings as they are come first, so that the end is never slower than the beginning. What
    needs at least the memory of a candidate that ran out of it is not tried.

    Args:
        space: the candidates.
        points: what was tried.
        strategy: how to choose.
        trials: at most.
        seed: of what is drawn.
        refused: candidates that don't fit by the plan, for whatever reason.
        too_large: those of them that the devices have too little memory for, where what needs at
            least as much doesn't fit either. What lacks main memory beside a GPU rules out nothing:
            in the fallback order others may need less of it.
    """
    tried = {space.candidate(point.settings) for point in points}
    if len(tried) >= trials:
        return None
    if space.start is not None and space.start not in (*tried, *refused):
        return space.start
    ran_out = [point.settings for point in points if point.outcome == "out of memory"]
    too_large = [*too_large, *(space.candidate(settings) for settings in ran_out)]
    left = [
        candidate
        for candidate in space.candidates
        if candidate not in tried
        and candidate not in refused
        and not any(space.needs_as_much(candidate, failed) for failed in too_large)
    ]
    return CHOICES[strategy](space, left, points, seed) if left else None


def usual_trials(strategy: Strategy, candidates: int) -> int:
    """Trials of a step where no number is given."""
    return candidates if strategy == "grid" else min(-(-candidates // 3), MOST_TRIALS)


def _in_order(
    _space: Space, left: Sequence[Candidate], _points: Sequence[Point], _seed: int
) -> Candidate:
    return left[0]


def _at_random(
    space: Space, left: Sequence[Candidate], _points: Sequence[Point], seed: int
) -> Candidate:
    order = list(space.candidates)
    random.Random(seed).shuffle(order)
    chances = set(left)
    return next(candidate for candidate in order if candidate in chances)


def _by_model(
    space: Space, left: Sequence[Candidate], points: Sequence[Point], _seed: int
) -> Candidate:
    from pipeline.autotune.throughput import most_promising

    return most_promising(space, left, points)


CHOICES: Mapping[
    Strategy, Callable[[Space, Sequence[Candidate], Sequence[Point], int], Candidate]
] = {"grid": _in_order, "random": _at_random, "model": _by_model}
