"""A child process whose end, and whose interruption, the parent hears of exactly once."""

import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Ending:
    """How a child ended."""

    code: int
    """Its exit code; -n where signal n ended it."""

    interrupted: bool
    """Whether this process was told to stop meanwhile: Ctrl-C, SIGTERM or a closed terminal."""


def run_child(command: Sequence[str], environment: Mapping[str, str]) -> Ending:
    """Run a command to its end; its output goes where ours goes.

    The child has a process group of its own and hears of every interruption from us, as SIGINT: so
    Ctrl-C in a terminal and SIGTERM from a scheduler reach it alike, once, and it closes its files
    before we go on.
    Standard input is closed to it, for it would stop a group in the background.
    """
    child: subprocess.Popen[bytes] | None = None
    interrupted = False

    def pass_on(_number: int, _frame: object) -> None:
        nonlocal interrupted
        interrupted = True
        if child is not None and child.poll() is None:
            child.send_signal(signal.SIGINT)

    # What our own caller has us ignore, as nohup does with SIGHUP, stays ignored.
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in heard}
    try:
        child = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, process_group=0
        )
        if interrupted:
            child.send_signal(signal.SIGINT)
        return Ending(child.wait(), interrupted)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
