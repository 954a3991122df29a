"""The way of a process's parts from its machine's disk into the directory of the run."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.engine.checkpoint.attempt import Attempt, Saved, reason_of
from pipeline.engine.checkpoint.host_copy import HostFragment, total_bytes
from pipeline.engine.checkpoint.local import LocalDirectory, LocalPart

logger = logging.getLogger(__name__)

NONE = -1
"""Number of a step that stands for no save."""


@dataclass(frozen=True)
class Upload:
    """A checkpoint that has been copied to the directory of the run."""

    step: int
    nbytes: int
    """Bytes that all processes have copied."""

    seconds: float
    """From the first byte to the checkpoint's name."""


class Uploads:
    """The parts that this process has on its machine, and threads that copy them, in turn.

    Saves are counted, by the same numbers on all processes. There are at most two parts: one that
    all processes have, and the next, which is written meanwhile.
    """

    def __init__(self, directory: LocalDirectory) -> None:
        self.directory = directory
        self._parts: dict[int, LocalPart] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._finished: list[Upload] = []
        self._changing = threading.Lock()

    @property
    def newest(self) -> int:
        """The last save whose part is on this machine; `NONE` where none is."""
        return max(self._parts, default=NONE)

    def part(self, number: int) -> LocalPart:
        """What that save has left here."""
        return self._parts[number]

    def make_room(self, kept: int) -> None:
        """Remove all parts but that of one save, as soon as they are copied, or can't be."""
        for number, thread in list(self._threads.items()):
            if number != kept:
                thread.join()
                del self._threads[number]
        self._parts = {number: part for number, part in self._parts.items() if number == kept}
        self.directory.keep(list(self._parts.values()))

    def add(self, number: int, part: LocalPart) -> None:
        """Count the part of that save, which is on the disk."""
        self._parts[number] = part

    def write(
        self, number: int, attempt: Attempt, saved: Saved, copies: Sequence[HostFragment]
    ) -> LocalPart | None:
        """Write that save's part to this machine's disk; or where the attempt is, if that fails.

        Raises:
            OSError: the system can do neither.
        """
        try:
            part = self.directory.write(
                saved.step,
                attempt.name,
                copies,
                base=saved.base,
                state=saved.state if attempt.rank == 0 else None,
            )
        except OSError as error:
            logger.warning(
                "%s; its part of step %d goes straight to %s",
                reason_of(error, attempt.rank, total_bytes(copies)),
                saved.step,
                attempt.target.parent,
            )
            attempt.write(copies)
            return None
        self._parts[number] = part
        return part

    def put(self, number: int, work: Callable[[], None]) -> None:
        """Have a thread do what copies that save's part, after those before it."""
        before = list(self._threads.values())

        def turn() -> None:
            for thread in before:
                thread.join()
            work()

        # Who forgets to wait does not wait for a peer that is gone.
        thread = threading.Thread(target=turn, name="upload", daemon=True)
        self._threads[number] = thread
        thread.start()

    def record(self, upload: Upload) -> None:
        """Note what has been copied."""
        with self._changing:
            self._finished.append(upload)

    def take_finished(self) -> list[Upload]:
        """What has been copied since the last call."""
        with self._changing:
            finished, self._finished = self._finished, []
        return finished

    def wait(self, patience_seconds: int | float | None = None) -> None:
        """Return when nothing is being copied, or after that time."""
        end = None if patience_seconds is None else time.monotonic() + patience_seconds
        for thread in list(self._threads.values()):
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        if end is None:
            self._threads.clear()

    def forget(self) -> None:
        """Remove all parts: they are of no use to anybody."""
        self._parts = {}
        self.directory.keep([])
