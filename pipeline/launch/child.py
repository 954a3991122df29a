"""Runs a child process, forwards each interruption to it once, and reports how it exited."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from pipeline.system.errors import EXIT_OUT_OF_MEMORY
from pipeline.system.memory import count_memory_kills
from pipeline.system.signals import INTERRUPTS, STOP_SIGNALS

SIGNALS = (*INTERRUPTS, *STOP_SIGNALS)


@dataclass(frozen=True)
class ExitStatus:
    """Exit status of a child process, and the resources that it used."""

    code: int
    """Exit code; -n if the child was killed by signal n."""

    signal_received: signal.Signals | None = None
    """The signal, from the terminal or a scheduler, that this process received while it waited."""

    peak_bytes: int = field(default=0, compare=False)
    """Peak resident memory of the child and its children; on Linux at least this process's memory
    when it started the child."""

    ran_out_of_memory: bool = field(default=False, compare=False)
    """Whether memory ran out, as shown by the child's own error or the kernel's signal."""


def run_child(
    command: Sequence[str], environment: Mapping[str, str], *, output: IO[bytes] | None = None
) -> ExitStatus:
    """Run a command to completion; its output goes to `output`, or to this process's.

    The child has its own process group, and this process forwards each interruption to it once:
    Ctrl-C and a closed terminal as SIGINT, a scheduler's signals unchanged. It then waits for the
    child to save its state. A second Ctrl-C is forwarded as well; the repeated signals of a closed
    terminal do not count as a second Ctrl-C. The child's standard input is closed, because
    reading from it would stop a background group.
    """
    child: subprocess.Popen[bytes] | None = None
    signal_received: signal.Signals | None = None
    kills = count_memory_kills()

    def send(number: int) -> None:
        # Popen.send_signal() would reap a child that has exited, so that wait4() fails.
        if child is not None and child.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(child.pid, number if number in STOP_SIGNALS else signal.SIGINT)

    def forward(number: int, _frame: object) -> None:
        nonlocal signal_received
        if number == signal.SIGHUP and signal_received is not None:
            return
        signal_received = signal.Signals(number)
        send(number)

    # Keep ignoring signals that the caller ignores, as nohup does with SIGHUP.
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, forward) for number in handled}
    try:
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
        )
        if signal_received is not None:
            send(signal_received)
        _, status, usage = os.wait4(child.pid, 0)
        code = child.returncode = os.waitstatus_to_exitcode(status)
        killed = code in (-signal.SIGKILL, 128 + signal.SIGKILL) and count_memory_kills() > kills
        out_of_memory = killed or code == EXIT_OUT_OF_MEMORY
        return ExitStatus(code, signal_received, usage.ru_maxrss * 1024, out_of_memory)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
