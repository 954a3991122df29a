"""Processes that compute longer than the others, for which these wait in every collective."""

import logging
import os
import statistics
import time

from jaxtyping import Float64
from torch import Tensor

from pipeline.parallel.group import Group
from pipeline.position import HERE

logger = logging.getLogger(__name__)

WINDOW = 20
"""Steps after which the processes compare."""

FACTOR = 1.5
"""From this multiple of the others' time on a process is slow."""

EXCEPTIONS = 2
"""Steps of a window that say nothing: any process stops for a moment now and then."""


class Stragglers:
    """Measures how long this process computes in each step, and says which one is slow.

    What it waits for the others in collectives doesn't count. Of a pipeline of that many `stages`
    the processes of one stage are compared, which do the same.
    """

    def __init__(self, world: Group, *, stages: int = 1) -> None:
        self._world = world
        self._alike = world.size // stages
        """Processes that do the same: neighbours in rank."""
        self.begin_step()
        self._seconds: list[float] = []
        self._reported: set[int] = set()

    def begin_step(self) -> None:
        """A step begins now; what came before was none."""
        self._start, self._waited = time.perf_counter(), HERE.waited()

    def end_step(self, step: int) -> None:
        """A step is over. At the end of a window all processes compare; the first one speaks."""
        elapsed = time.perf_counter() - self._start
        self._seconds.append(max(0.0, elapsed - (HERE.waited() - self._waited)))
        if self._alike > 1 and len(self._seconds) == WINDOW:
            self._compare(step - WINDOW + 1)
        if len(self._seconds) == WINDOW:
            self._seconds.clear()
        self.begin_step()

    def _compare(self, first_step: int) -> None:
        rows = self._world.gather_rows(self._seconds)
        slow = {
            first + each: factor
            for first in range(0, len(rows), self._alike)
            for each, factor in slow_ranks(rows[first : first + self._alike]).items()
        }
        new = slow.keys() - self._reported
        self._reported = set(slow)
        if not new:
            return
        hosts = self._world.gather_objects(os.uname().nodename)
        if self._world.rank == 0:
            for each in sorted(new):
                logger.warning(
                    "rank %d takes %.1f x the others' time since step %d (host %s)",
                    each,
                    slow[each],
                    first_step,
                    hosts[each],
                )


def slow_ranks(seconds: Float64[Tensor, "ranks steps"]) -> dict[int, float]:
    """Multiple of the others' median time of each rank that is slow in (nearly) every step.

    `seconds[r, s]`: how long rank r, of two or more, computed in step s.
    """
    factors = seconds / medians_of_others(seconds).clamp(min=1e-9)
    least = factors.sort(dim=1).values[:, min(EXCEPTIONS, factors.shape[1] - 1)]
    return {
        each: statistics.median(factors[each].tolist())
        for each in (least >= FACTOR).nonzero().flatten().tolist()
    }


def medians_of_others(
    seconds: Float64[Tensor, "ranks steps"],
) -> Float64[Tensor, "ranks steps"]:
    """For each rank and step the median over all other ranks: one sort of all for a step.

    Without its own element a sorted column moves up by one from there on.
    """
    ordered, order = seconds.sort(dim=0)
    places = order.argsort(dim=0)
    others = len(seconds) - 1
    low, high = (others - 1) // 2, others // 2
    return (
        ordered.gather(0, low + (places <= low).long())
        + ordered.gather(0, high + (places <= high).long())
    ) / 2
