"""Run one command on each of several machines, forward output, and stop all when one fails.

On each machine `python -m pipeline.launch.remote COMMAND ...` runs the command. It reads its
standard input: first a line of JSON with variables for the command's environment, then lines that
name a signal for the command, or empty lines, which show that the launcher is alive. If the
launcher or the connection is lost, the command is stopped, so that no process is left behind.
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

from pipeline.cli.options import print_error
from pipeline.launch.child import SIGNALS
from pipeline.launch.commands import MISSING_REASONS
from pipeline.system.errors import EXIT_USER_ERROR
from pipeline.system.signals import STOP_SIGNALS

HEARTBEAT_SECONDS = 10.0
"""Seconds between two heartbeat lines to a remote process."""

HEARTBEAT_TIMEOUT_SECONDS = 60.0
"""Seconds without a line after which a remote process assumes that the launcher is lost."""

FAILURE_GRACE_SECONDS = 15.0
"""Seconds for the commands on other machines to exit after a failure, before they are signaled."""

GRACE_SECONDS = 30.0
"""Seconds for a command to exit after a signal, before it is killed or disconnected."""

SAVE_GRACE_SECONDS = 600.0
"""Seconds for processes to save their state after Ctrl-C or a scheduler's signal."""

EXIT_LOST = 255
"""ssh's exit code if the connection, not the command, failed."""

POLL_SECONDS = 0.05


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

    lost_message: str = "the connection failed or was lost"
    """Message about a lost machine, which follows its name."""


def run_on_all_hosts(remotes: Sequence[RemoteCommand]) -> int:
    """Run all commands to completion; return the exit code of the first failure, else 0.

    Output lines are prefixed with the host's name, and signals are forwarded to the commands.
    `remotes` contains one command per machine, in order.
    """
    group = _Group()
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous_handlers = {number: signal.signal(number, group.record_signal) for number in handled}
    try:
        group.commands = [_Command(remote, prefixed=len(remotes) > 1) for remote in remotes]
        return group.wait()
    finally:
        for command in group.commands:
            command.close()
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


class _Group:
    """The commands of several machines."""

    def __init__(self) -> None:
        self.commands: list[_Command] = []
        self._signals: list[signal.Signals] = []
        self._num_forwarded = 0
        self._first_failure: _Command | None = None
        self._deadline = float("inf")
        """Time at which running commands are signaled or, if they already were, disconnected."""

    def record_signal(self, number: int, _frame: object) -> None:
        """Store a signal for the loop to forward."""
        if number == signal.SIGHUP and self._signals:
            return  # closing a terminal sends more than one
        self._signals.append(signal.Signals(number))

    def wait(self) -> int:
        """Wait for all commands to exit; return the launcher's exit code."""
        next_heartbeat = time.monotonic()
        while running := [command for command in self.commands if command.poll() is None]:
            self._forward_signals(running)
            if time.monotonic() >= next_heartbeat:
                next_heartbeat += HEARTBEAT_SECONDS
                for command in running:
                    command.send("")
            self._handle_failures(running)
            if time.monotonic() >= self._deadline:
                self._deadline = time.monotonic() + GRACE_SECONDS
                for command in running:
                    command.terminate()
            time.sleep(POLL_SECONDS)
        self._handle_failures([])
        for command in self.commands:
            command.drain_output()
        if self._first_failure is not None:
            return self._first_failure.exit_code
        if self._signals:
            return next(filter(None, (command.exit_code for command in self.commands)), 0)
        return self.commands[0].exit_code

    def _forward_signals(self, running: Sequence["_Command"]) -> None:
        for number in self._signals[self._num_forwarded :]:
            self._num_forwarded += 1
            name = number.name if number in STOP_SIGNALS else signal.SIGINT.name
            aborts = number == signal.SIGINT and self._num_forwarded > 1
            self._deadline = time.monotonic() + (GRACE_SECONDS if aborts else SAVE_GRACE_SECONDS)
            for command in running:
                command.send(name)

    def _handle_failures(self, running: Sequence["_Command"]) -> None:
        for command in self.commands:
            if not command.code or command.failure_handled:
                continue
            command.failure_handled = True
            command.drain_output()
            if self._signals or (self._first_failure is not None and command.code != EXIT_LOST):
                continue
            if command.code != EXIT_USER_ERROR:  # it has printed its error
                print_error(f"{command.describe()}{'; stopping the others' if running else ''}")
            if self._first_failure is None:
                self._first_failure = command
                self._deadline = time.monotonic() + FAILURE_GRACE_SECONDS


class _Command:
    """A command running on one machine, whose output is forwarded."""

    def __init__(self, remote: RemoteCommand, *, prefixed: bool) -> None:
        self.host = remote.host
        self.code: int | None = None
        self.failure_handled = False
        self._terminated = False
        self._lost_message = remote.lost_message
        pipe = subprocess.PIPE
        self._process = remote.start(
            remote.command, stdin=pipe, stdout=pipe, stderr=pipe, process_group=0
        )
        self.send(json.dumps(dict(remote.environment)))
        prefix = f"{remote.host}: ".encode() if prefixed else b""
        streams = ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
        self._threads = [
            threading.Thread(target=_forward_lines, args=(source, sink, prefix), daemon=True)
            for source, sink in streams
        ]
        for thread in self._threads:
            thread.start()

    def poll(self) -> int | None:
        """Return the command's exit code, or None while it runs."""
        self.code = self._process.poll()
        return self.code

    @property
    def exit_code(self) -> int:
        """The launcher's exit code, if this command determines it."""
        code = self.code or 0
        if code == EXIT_LOST:
            return 1
        return code if code >= 0 else 128 - code

    def send(self, line: str) -> None:
        """Send a line to the remote side, if it is still connected."""
        if self._process.stdin is not None:
            with suppress(OSError, ValueError):
                self._process.stdin.write(f"{line}\n".encode())
                self._process.stdin.flush()

    def terminate(self) -> None:
        """Ask the command to stop; a second call closes the connection."""
        if self._terminated:
            self.close()
        self._terminated = True
        self.send(signal.SIGTERM.name)

    def describe(self) -> str:
        """Describe how the command exited, for an error message."""
        if self.code == EXIT_LOST:
            return f"{self.host}: {self._lost_message}"
        code = self.exit_code
        if code in MISSING_REASONS:
            return f"{self.host} {MISSING_REASONS[code]}"
        if code > 128 and (number := code - 128) in set(signal.Signals):
            return f"{self.host} exited first, killed by {signal.Signals(number).name}"
        return f"{self.host} exited first, with exit code {code}"

    def drain_output(self) -> None:
        """Forward the remaining output, before the command's exit is reported."""
        for thread in self._threads:
            thread.join(timeout=5)

    def close(self) -> None:
        """Stop the local process, which also stops the remote one."""
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


def _forward_lines(source: IO[bytes], sink: IO[str], prefix: bytes) -> None:
    """Forward complete lines, so that lines from several machines don't mix."""
    for line in source:
        sink.buffer.write(prefix + line.rstrip(b"\n") + b"\n")  # pyrefly: ignore[missing-attribute]
        sink.flush()


# The remote side

STDIN = 0


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code, or 128 + n if signal n killed it."""
    buffer, is_open = b"", True
    while b"\n" not in buffer and is_open:
        buffer += (received := os.read(STDIN, 2**16))
        is_open = bool(received)
    line, _, buffer = buffer.partition(b"\n")
    command = subprocess.Popen(
        argv,
        env={**os.environ, **json.loads(line or "{}")},
        stdin=subprocess.DEVNULL,
        process_group=0,
    )
    last_received = time.monotonic()
    while command.poll() is None:
        *lines, buffer = buffer.split(b"\n")
        for name in filter(None, lines):
            command.send_signal(signal.Signals[name.decode().strip()])
        if not is_open or time.monotonic() - last_received > HEARTBEAT_TIMEOUT_SECONDS:
            _terminate(command)
            with suppress(OSError):  # the reader may be gone too
                sys.stderr.write("the launcher is gone; its processes here were stopped\n")
        elif select.select([STDIN], [], [], POLL_SECONDS)[0]:
            buffer += (received := os.read(STDIN, 2**16))
            is_open, last_received = bool(received), time.monotonic()
    code = command.returncode
    return code if code >= 0 else 128 - code


def _terminate(command: subprocess.Popen[bytes]) -> None:
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
