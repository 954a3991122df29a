"""Position of this process: the collectives it has reached, and its time waiting in them."""

import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

SAME_ORDER = "all processes must run the same layers of the same engines in the same order"

RECENT = 512
"""Length of the history: a few steps of a model with many layers."""


class DesyncError(RuntimeError):
    """The processes of a job ran different collectives, or one has ended."""


class Collective(NamedTuple):
    """A collective that a process entered, for comparison with other processes."""

    number: int
    kind: str
    unit: str = ""
    num_bytes: int = 0

    def __str__(self) -> str:
        name = f"{self.kind} of {self.unit}" if self.unit else self.kind
        return f"{name}, {self.num_bytes} bytes" if self.num_bytes else name


class Position:
    """Counts this process's collectives, and the seconds it waited for other processes.

    `enter_collective` is called before every collective of a training step; a thread of
    `pipeline.watchdog.process` reads the state at any time.
    """

    def __init__(self) -> None:
        self.number = 0
        self.fingerprint = 0
        """Fingerprint of all collectives so far, in order."""
        self.recent: deque[Collective] = deque(maxlen=RECENT)
        """The latest collectives, oldest first."""
        self.transfers = 0
        """Number of tensors received from pipeline stages."""
        self.waits_for: tuple[int, ...] = ()
        """Ranks of the processes that this one is waiting for, as far as it knows."""
        self.waits_at = ""
        """Reason for waiting, if it is not a collective."""
        self._waited = 0.0
        self._stalls: deque[tuple[Any, Any]] = deque(maxlen=10_000)

    def enter_collective(self, kind: str, unit: str = "", num_bytes: int = 0) -> None:
        """Record the next collective."""
        self.number += 1
        self.fingerprint = zlib.crc32(f"{kind} {unit} {num_bytes}".encode(), self.fingerprint)
        self.recent.append(Collective(self.number, kind, unit, num_bytes))

    @property
    def last(self) -> Collective:
        """The latest collective."""
        return self.recent[-1] if self.recent else Collective(0, "none yet")

    @contextmanager
    def waiting(self, ranks: Sequence[int] = (), at: str = "") -> Iterator[None]:
        """Context whose time counts as waiting for these processes.

        `at` describes the wait if it is not for a collective that this process has entered.
        """
        start = time.perf_counter()
        self.waits_for, self.waits_at = tuple(ranks), at  # doesn't copy tuples
        try:
            yield
        finally:
            self.waits_for, self.waits_at = (), ""
            self._waited += time.perf_counter() - start

    def add_stall(self, begin: Any, end: Any) -> None:  # noqa: ANN401  # CUDA events
        """Count the time between two events of the compute stream as waiting, once they pass."""
        self._stalls.append((begin, end))

    def waited(self) -> float:
        """Total seconds of waiting."""
        while self._stalls and self._stalls[0][1].query():
            begin, end = self._stalls.popleft()
            self._waited += begin.elapsed_time(end) / 1000
        return self._waited


HERE = Position()
"""The position of this process."""
