"""Runs one command on this machine for a launcher on another one.

`python -m pipeline.launch.node COMMAND ...` reads its standard input: first a line of JSON, with
variables for the command's environment; then lines with the name of a signal for the command, or
empty ones, which show that the launcher is alive. Without the launcher, or the connection to it,
the command is ended, so that no process is left behind.
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
"""Without a line, after which the launcher counts as lost."""

GRACE_SECONDS = 30.0
"""For the command to save its state and end, when the launcher is lost."""

TICK_SECONDS = 0.1
STDIN = 0


def main(argv: Sequence[str], *, lost_seconds: float = LOST_SECONDS) -> int:
    """Run the command; return its exit code, 128 + n where signal n ended it."""
    rest, is_open = b"", True
    while b"\n" not in rest and is_open:
        rest += (received := os.read(STDIN, 2**16))
        is_open = bool(received)
    line, _, rest = rest.partition(b"\n")
    command = subprocess.Popen(
        argv,
        env={**os.environ, **json.loads(line or "{}")},
        stdin=subprocess.DEVNULL,
        process_group=0,
    )
    heard = time.monotonic()
    while command.poll() is None:
        *lines, rest = rest.split(b"\n")
        for name in filter(None, lines):
            command.send_signal(signal.Signals[name.decode().strip()])
        if not is_open or time.monotonic() - heard > lost_seconds:
            _end(command)
            with suppress(OSError):  # the reader may be lost as well
                sys.stderr.write("the launcher is gone; its processes here have been ended\n")
        elif select.select([STDIN], [], [], TICK_SECONDS)[0]:
            rest += (received := os.read(STDIN, 2**16))
            is_open, heard = bool(received), time.monotonic()
    code = command.returncode
    return code if code >= 0 else 128 - code


def _end(command: subprocess.Popen[bytes]) -> None:
    """Ask the command to stop, and after a while end all processes that it has started."""
    started = psutil.Process(command.pid).children(recursive=True)
    command.terminate()
    try:
        command.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        command.kill()
    for process in started:  # torchrun's have separate groups
        with suppress(psutil.NoSuchProcess):
            process.kill()
    command.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
