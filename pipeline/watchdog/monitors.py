"""Detection of slow processes, and the memory of the largest process."""

import logging
import os
import statistics
import time

import psutil
import torch
from jaxtyping import Float64
from torch import Tensor

from pipeline.parallel.group import Group
from pipeline.system.position import HERE

logger = logging.getLogger(__name__)

WINDOW = 20
"""Steps after which the processes compare their times."""

FACTOR = 1.5
"""Factor over the other processes' time above which a process counts as slow."""

EXCEPTIONS = 2
"""Steps per window that are ignored, since any process may pause occasionally."""


class Stragglers:
    """Measures how long each process computes in a step, and logs which one is slow.

    Time spent waiting for other processes in collectives is excluded. In a pipeline of several
    `stages` the processes of one stage, which do the same work, are compared with each other.
    """

    def __init__(self, world: Group, *, stages: int = 1) -> None:
        self._world = world
        self._alike = world.size // stages
        self.begin_step()
        self._seconds: list[float] = []
        self._reported: set[int] = set()

    def begin_step(self) -> None:
        """Start timing a step."""
        self._start, self._waited = time.perf_counter(), HERE.waited()

    def end_step(self, step: int) -> None:
        """End a step. At the end of a window all processes compare times; the first one logs."""
        elapsed = time.perf_counter() - self._start
        self._seconds.append(max(0.0, elapsed - (HERE.waited() - self._waited)))
        if len(self._seconds) == WINDOW:
            if self._alike > 1:
                self._compare(step - WINDOW + 1)
            self._seconds.clear()
        self.begin_step()

    def _compare(self, first_step: int) -> None:
        rows = torch.tensor(self._world.gather_objects(self._seconds), dtype=torch.float64)
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
                    "rank %d has taken %.1f times as long as the others since step %d (host %s)",
                    each,
                    slow[each],
                    first_step,
                    hosts[each],
                )


def slow_ranks(seconds: Float64[Tensor, "ranks steps"]) -> dict[int, float]:
    """Slowdown of each rank that is slow in nearly every step, relative to the others' median.

    `seconds[r, s]` is the compute time of rank r, of two or more, in step s.
    """
    slow: dict[int, float] = {}
    for rank in range(len(seconds)):
        others = torch.cat([seconds[:rank], seconds[rank + 1 :]]).quantile(0.5, dim=0)
        factors = sorted((seconds[rank] / others.clamp(min=1e-9)).tolist())
        if factors[min(EXCEPTIONS, len(factors) - 1)] >= FACTOR:
            slow[rank] = statistics.median(factors)
    return slow


def peak_memory(world: Group) -> float:
    """Memory in GB of the largest process; on a GPU, its peak. A collective."""
    own = (
        torch.cuda.max_memory_allocated()
        if torch.cuda.is_available()
        else psutil.Process().memory_info().rss
    )
    return round(world.max(own) / 1e9, 3)
