"""Interruption by Ctrl-C or a scheduler: finish the current step, save and exit."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals sent by schedulers: SIGTERM, and SLURM's warning with `--signal=USR1@120`."""

INTERRUPTS = (signal.SIGINT, signal.SIGHUP)
"""Signals sent by Ctrl-C and by a closed terminal."""

EXIT_REQUEUE = 75
"""EX_TEMPFAIL in sysexits.h: nothing is wrong; run the same command again with --resume."""

EXIT_INTERRUPTED = 130
"""128 + SIGINT, as in shells."""

DUPLICATE_SECONDS = 0.3
"""Seconds within which repeated signals count as one: `timeout` signals both the process and its
group, and a launcher forwards signals that the process has already received."""

STOP_BYTE = b"\0"
"""Byte that stops the listening thread; no signal has this number."""


def exit_on_interrupt() -> None:
    """Until `run_main`, make Ctrl-C exit without a traceback from an import."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_interrupted)


def exit_interrupted(_number: int, _frame: FrameType | None) -> None:
    """Exit at once, with a line on standard error from rank 0."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)


class StopSignals:
    """Context manager that records stop signals in `received`; a second Ctrl-C aborts.

    After a scheduler's signal, only Ctrl-C aborts the process: SLURM sends SIGUSR1 and, at the time
    limit, SIGTERM, while the state is being saved. After Ctrl-C, any further signal aborts it,
    except that of a closed terminal. Signals that the caller has set to be ignored, as nohup does,
    stay ignored.

    `announce` is called on the first signal, and again, with `aborts=True`, just before the process
    aborts: immediately, from another thread, even while the main thread waits in a collective,
    where Python would not run a handler.
    """

    def __init__(self, announce: Callable[..., None]) -> None:
        self.received: signal.Signals | None = None
        self._announce = announce
        self._first_at: float | None = None
        self._previous_handlers: dict[signal.Signals, object] = {}
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            return self
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in (*INTERRUPTS, *STOP_SIGNALS):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous_handlers[number] = signal.signal(number, self._record)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_error: object) -> None:
        if self._thread is None:
            return
        # A process that exits because others got a signal may still get one itself: ignore it.
        if self.received is not None or exc_type is not SystemExit:
            for number, handler in self._previous_handlers.items():
                signal.signal(number, handler)  # pyrefly: ignore[bad-argument-type]
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        os.write(self._write_end, STOP_BYTE)
        self._thread.join(1)  # it may be blocked on a stopped terminal
        self._thread = None
        os.close(self._read_end)
        os.close(self._write_end)

    def _record(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal in the main thread: only record it, so that the current step finishes."""
        self.received = self.received or signal.Signals(number)

    def _listen(self) -> None:
        """Read signal numbers from the wakeup pipe in a separate thread."""
        while (number := os.read(self._read_end, 1)) != STOP_BYTE:
            if number[0] in self._previous_handlers:
                self._handle(signal.Signals(number[0]))

    def _handle(self, number: signal.Signals) -> None:
        now = time.monotonic()
        self.received = first = self.received or number
        if self._first_at is None:
            self._first_at = now
            self._announce(number, aborts=False)
            return
        is_ctrl_c = number is signal.SIGINT or first is signal.SIGINT
        is_abort = is_ctrl_c and number is not signal.SIGHUP
        if is_abort and now - self._first_at >= DUPLICATE_SECONDS:
            self._announce(number, aborts=True)
            os._exit(EXIT_INTERRUPTED)


@contextmanager
def default_sigint() -> Iterator[None]:
    """Context manager for a wait in which Python runs no handlers: Ctrl-C kills the process.

    Otherwise the process would keep waiting for others that the same Ctrl-C has killed.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class ExitOnSignal:
    """Context manager in which a scheduler's signal makes the process exit with EXIT_REQUEUE.

    Before the first step and after the last, there is nothing to save. Ctrl-C raises a
    KeyboardInterrupt as usual. A signal that already has a handler keeps it.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._installed: list[signal.Signals] = []

    def __enter__(self) -> "ExitOnSignal":
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) == signal.SIG_DFL:
                    signal.signal(number, self._exit_to_requeue)
                    self._installed.append(number)
        return self

    def __exit__(self, *_error: object) -> None:
        for number in self._installed:
            signal.signal(number, signal.SIG_DFL)

    def _exit_to_requeue(self, number: int, _frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
            raise SystemExit(EXIT_REQUEUE)
