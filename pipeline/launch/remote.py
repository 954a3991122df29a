"""Runs one command on each of several machines, forwards output, and ends all when one fails.

On each machine `python -m pipeline.launch.remote COMMAND ...` runs the command. It reads its
standard input: first a line of JSON, with variables for the command's environment; then lines with
the name of a signal for the command, or empty ones, which show that the launcher is alive. If the
launcher or the connection is lost, the command is ended, so that no process is left behind.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

import psutil

from pipeline.cli.options import EXIT_USER_ERROR, complain
from pipeline.launch.child import SIGNALS
from pipeline.launch.commands import MISSING
from pipeline.system.signals import STOP_SIGNALS

HEARTBEAT_SECONDS = 10.0
"""Seconds between two lines to a remote process."""

LOST_SECONDS = 60.0
"""Seconds without a line after which a remote process assumes that the launcher is lost."""

HEARING_SECONDS = 15.0
"""Seconds for the other machines to end after a failure, before they get a signal."""

GRACE_SECONDS = 30.0
"""Seconds for a command to end after a signal, before it or the connection is ended."""

SAVING_SECONDS = 600.0
"""Seconds for processes to save their state after Ctrl-C or a scheduler's signal."""

LOST = 255
"""ssh's exit code if the connection, not the command, failed."""

TICK_SECONDS = 0.05


@dataclass(frozen=True)
class RemoteCommand:
    """The command for one machine."""

    host: str
    command: Sequence[str]
    """Command on this machine whose standard streams are connected to the remote command."""

    environment: Mapping[str, str]
    """Variables of the remote command, which are sent through standard input."""

    start: Callable[..., Any] = subprocess.Popen
    """Starts the command, with the arguments of `subprocess.Popen`."""

    lost: str = "the connection failed or was lost"
    """Clause for a lost machine."""


def run_everywhere(remotes: Sequence[RemoteCommand]) -> int:
    """Run all commands to completion; return the exit code of the first failure, else 0.

    Output lines are prefixed with the host's name, and signals are forwarded to the commands.
    `remotes` has one command per machine, in order.
    """
    group = _Group()
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, group.note_signal) for number in handled}
    try:
        group.commands = [_Command(each, prefixed=len(remotes) > 1) for each in remotes]
        return group.wait()
    finally:
        for command in group.commands:
            command.close()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Group:
    """The commands of several machines."""

    def __init__(self) -> None:
        self.commands: list[_Command] = []
        self._signals: list[signal.Signals] = []
        self._passed_on = 0
        self._failed: _Command | None = None
        self._deadline = float("inf")
        """Time at which running commands are signalled or, if they already were, disconnected."""

    def note_signal(self, number: int, _frame: object) -> None:
        """Store a signal for the loop to forward."""
        if number == signal.SIGHUP and self._signals:
            return  # closing a terminal sends more than one
        self._signals.append(signal.Signals(number))

    def wait(self) -> int:
        """Wait for all commands to end; return the exit code."""
        beat = time.monotonic()
        while running := [each for each in self.commands if each.poll() is None]:
            self._pass_on(running)
            if time.monotonic() >= beat:
                beat += HEARTBEAT_SECONDS
                for command in running:
                    command.send("")
            self._note_failures(running)
            if time.monotonic() >= self._deadline:
                self._deadline = time.monotonic() + GRACE_SECONDS
                for command in running:
                    command.end()
            time.sleep(TICK_SECONDS)
        self._note_failures([])
        for command in self.commands:
            command.finish_output()
        if self._failed is not None:
            return self._failed.exit_code
        if self._signals:
            return next((each.exit_code for each in self.commands if each.exit_code), 0)
        return self.commands[0].exit_code

    def _pass_on(self, running: Sequence["_Command"]) -> None:
        for number in self._signals[self._passed_on :]:
            self._passed_on += 1
            name = number.name if number in STOP_SIGNALS else signal.SIGINT.name
            aborts = number == signal.SIGINT and self._passed_on > 1
            self._deadline = time.monotonic() + (GRACE_SECONDS if aborts else SAVING_SECONDS)
            for command in running:
                command.send(name)

    def _note_failures(self, running: Sequence["_Command"]) -> None:
        for command in self.commands:
            if not command.code or command.noticed:
                continue
            command.noticed = True
            command.finish_output()
            if self._signals or (self._failed is not None and command.code != LOST):
                continue
            if command.code != EXIT_USER_ERROR:  # it has printed its error
                complain(f"{command.describe()}{'; stopping the others' if running else ''}")
            if self._failed is None:
                self._failed = command
                self._deadline = time.monotonic() + HEARING_SECONDS


class _Command:
    """A command running on one machine, whose output is passed on."""

    def __init__(self, remote: RemoteCommand, *, prefixed: bool) -> None:
        self.host = remote.host
        self.code: int | None = None
        self.noticed = False
        self._asked_to_end = False
        self._lost = remote.lost
        pipe = subprocess.PIPE
        self._process = remote.start(
            remote.command, stdin=pipe, stdout=pipe, stderr=pipe, process_group=0
        )
        self.send(json.dumps(dict(remote.environment)))
        prefix = f"{remote.host}: ".encode() if prefixed else b""
        streams = ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
        self._threads = [
            threading.Thread(target=_pass_lines, args=(source, sink, prefix), daemon=True)
            for source, sink in streams
        ]
        for thread in self._threads:
            thread.start()

    def poll(self) -> int | None:
        """The exit code once the command has ended, else None."""
        self.code = self._process.poll()
        return self.code

    @property
    def exit_code(self) -> int:
        """The launcher's exit code, if this command determines it."""
        code = self.code or 0
        if code == LOST:
            return 1
        return code if code >= 0 else 128 - code

    def send(self, line: str) -> None:
        """Send a line to the remote side, if it is still connected."""
        if self._process.stdin is not None:
            with suppress(OSError, ValueError):
                self._process.stdin.write(f"{line}\n".encode())
                self._process.stdin.flush()

    def end(self) -> None:
        """Ask the command to end; a second call closes the connection."""
        if self._asked_to_end:
            self.close()
        self._asked_to_end = True
        self.send(signal.SIGTERM.name)

    def describe(self) -> str:
        """A clause that describes how it ended."""
        if self.code == LOST:
            return f"{self.host}: {self._lost}"
        code = self.exit_code
        if code in MISSING:
            return f"{self.host} {MISSING[code]}"
        if code > 128 and (number := code - 128) in set(signal.Signals):
            return f"{self.host} exited first, by {signal.Signals(number).name}"
        return f"{self.host} exited first, with exit code {code}"

    def finish_output(self) -> None:
        """Forward all output, before the command's end is reported."""
        for thread in self._threads:
            thread.join(timeout=5)

    def close(self) -> None:
        """End the local process; the remote process then ends as well."""
        with suppress(OSError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _pass_lines(source: IO[bytes], sink: IO[str], prefix: bytes) -> None:
    """Forward complete lines, so that lines from several machines don't mix."""
    for line in source:
        sink.buffer.write(prefix + line.rstrip(b"\n") + b"\n")  # pyrefly: ignore[missing-attribute]
        sink.flush()


# The remote side

STDIN = 0


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code, or 128 + n if signal n ended it."""
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
        if not is_open or time.monotonic() - heard > LOST_SECONDS:
            _end(command)
            with suppress(OSError):  # the reader may be gone too
                sys.stderr.write("the launcher is gone; its processes here were stopped\n")
        elif select.select([STDIN], [], [], TICK_SECONDS)[0]:
            rest += (received := os.read(STDIN, 2**16))
            is_open, heard = bool(received), time.monotonic()
    code = command.returncode
    return code if code >= 0 else 128 - code


def _end(command: subprocess.Popen[bytes]) -> None:
    """Ask the command to stop; after a grace period, kill all processes that it started."""
    started = psutil.Process(command.pid).children(recursive=True)
    command.terminate()
    try:
        command.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        command.kill()
    for process in started:  # torchrun's children have separate groups
        with suppress(psutil.NoSuchProcess):
            process.kill()
    command.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
