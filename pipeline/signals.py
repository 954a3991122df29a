"""Being told to stop by a scheduler: finish the step at hand, save, leave."""

import signal
import threading
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""SIGTERM: a scheduler takes the machine back. SIGUSR1: SLURM's warning, `--signal=USR1@120`."""

EXIT_REQUEUE = 75
"""EX_TEMPFAIL of sysexits.h: nothing is wrong, start the same command with --resume again."""


class StopSignals:
    """Context in which SIGTERM and SIGUSR1 only set `received`; the second one ends the process."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_error: object) -> None:
        self._restore()

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        self._before = {}
