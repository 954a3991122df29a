"""What grows without need in a run that goes on for days: memory, descriptors, threads."""

import logging

import psutil
import torch

from pipeline.parallel.group import Group

logger = logging.getLogger(__name__)

SETTLED = 10
"""Steps until a run has opened what it needs."""

A_FEW = 16


class Health:
    """Looks after the largest process of a job."""

    def __init__(self, world: Group) -> None:
        self._world = world
        self._process = psutil.Process()
        self._before: tuple[float, float] | None = None
        self._has_warned = False

    def look(self, step: int) -> float:
        """Memory in GB of the largest process, of its GPU at its peak where it has one.

        All processes call it after the same steps.
        """
        memory, descriptors, threads = self._world.maxima(
            [_memory_bytes(self._process), _descriptors(self._process), self._process.num_threads()]
        )
        if step >= SETTLED:
            self._compare(step, descriptors, threads)
        return round(memory / 1e9, 3)

    def _compare(self, step: int, descriptors: float, threads: float) -> None:
        if self._before is None:
            self._before, self._since = (descriptors, threads), step
            return
        grown = max(descriptors - self._before[0], threads - self._before[1]) > A_FEW
        if grown and not self._has_warned:
            self._has_warned = True
            logger.info(
                "a process has %.0f open files and %.0f threads after step %d, and had %.0f and"
                " %.0f after step %d: something isn't closed",
                descriptors,
                threads,
                step,
                *self._before,
                self._since,
            )


def _memory_bytes(process: psutil.Process) -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return process.memory_info().rss


def _descriptors(process: psutil.Process) -> int:
    return process.num_fds() if hasattr(process, "num_fds") else 0
