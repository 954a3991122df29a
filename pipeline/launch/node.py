"""Runs one command on this machine for a launcher on another one.

`python -m pipeline.launch.node COMMAND ...` is told through its standard input: first a line of
JSON, variables for the command's environment; then lines with the name of a signal for the command,
or nothing, which says that the launcher is there. Where the launcher or the way to it is gone, the
command is ended: no process stays behind on a machine that nobody watches any more.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

HEARTBEAT_SECONDS = 10.0
"""Between two lines of the launcher."""

LOST_SECONDS = 60.0
"""Of silence, after which the launcher counts as gone."""

GRACE_SECONDS = 30.0
"""For the command to save its state and leave, when the launcher is gone."""

TICK_SECONDS = 0.1
STDIN = 0


def main(argv: Sequence[str], *, lost_seconds: float = LOST_SECONDS) -> int:
    """Run the command; return its exit code, 128 + n where signal n ended it."""
    launcher = _Launcher()
    command = subprocess.Popen(
        argv,
        env={**os.environ, **json.loads(launcher.first_line())},
        stdin=subprocess.DEVNULL,
        process_group=0,
    )
    while command.poll() is None:
        for name in launcher.lines(TICK_SECONDS):
            if name:
                command.send_signal(signal.Signals[name])
        if launcher.is_gone(lost_seconds):
            _end(command)
            with suppress(OSError):  # who would read it may be gone as well
                sys.stderr.write("the launcher is gone; its processes here have been ended\n")
    code = command.returncode
    return code if code >= 0 else 128 - code


class _Launcher:
    """The other end of standard input."""

    def __init__(self) -> None:
        self._rest = b""
        self._ended = False
        self._heard = time.monotonic()

    def first_line(self) -> str:
        """The line that comes first, however long it takes."""
        while b"\n" not in self._rest and not self._ended:
            self._read()
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode() or "{}"

    def lines(self, seconds: float) -> list[str]:
        """The lines read within the next `seconds`; empty ones too."""
        if self._ended:
            time.sleep(seconds)
        elif select.select([STDIN], [], [], seconds)[0]:
            self._read()
        *lines, self._rest = self._rest.split(b"\n")
        return [line.decode().strip() for line in lines]

    def is_gone(self, lost_seconds: float) -> bool:
        return self._ended or time.monotonic() - self._heard > lost_seconds

    def _read(self) -> None:
        received = os.read(STDIN, 2**16)
        self._rest += received
        self._ended = not received
        self._heard = time.monotonic()


def _end(command: subprocess.Popen[bytes]) -> None:
    """Tell the command to stop, and after a while end all that it has started."""
    started = psutil.Process(command.pid).children(recursive=True)
    command.terminate()
    try:
        command.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        command.kill()
    for process in started:  # torchrun's have groups of their own
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    command.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
