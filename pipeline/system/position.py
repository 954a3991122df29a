"""Position of this process: the collectives it has reached, and the processes it is waiting for."""

import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

SAME_ORDER = "all processes must run the same layers of the same engines in the same order"

RECENT = 512
"""Length of the history: a few steps of a model with many layers."""


class DesyncError(RuntimeError):
    """The processes of a job ran different collectives, or one of them exited."""


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
    """Counts this process's collectives, and names the processes it is waiting for.

    `enter_collective` is called before every collective of a training step; a thread of
    `pipeline.watchdog.process` may read the state at any time.
    """

    def __init__(self) -> None:
        self.number = 0
        self.fingerprint = 0
        """Fingerprint of all collectives so far, in order."""
        self.recent: deque[Collective] = deque(maxlen=RECENT)
        """The latest collectives, oldest first."""
        self.transfers = 0
        """Number of tensors received from other pipeline stages."""
        self.awaited_ranks: tuple[int, ...] = ()
        """Ranks of the processes that this one is waiting for, as far as it knows."""
        self.wait_reason = ""
        """Reason for waiting, if it is not a collective."""

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
    def waiting(self, ranks: Sequence[int], reason: str = "") -> Iterator[None]:
        """Context manager that marks this process as waiting for these ranks.

        `reason` describes the wait if it is not for a collective that this process has entered.
        """
        self.awaited_ranks, self.wait_reason = tuple(ranks), reason  # tuple() does not copy a tuple
        try:
            yield
        finally:
            self.awaited_ranks, self.wait_reason = (), ""


POSITION = Position()
"""The position of this process."""
