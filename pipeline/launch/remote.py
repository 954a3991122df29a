"""One command on each of several machines: passes their output on, ends all when one fails."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from pipeline.cli import EXIT_USER_ERROR, complain, remark
from pipeline.launch.child import SIGNALS
from pipeline.launch.node import HEARTBEAT_SECONDS
from pipeline.signals import STOP_SIGNALS

HEARING_SECONDS = 15.0
"""For the other machines to end by themselves after a failure, before they are asked to."""

GRACE_SECONDS = 30.0
"""For a machine that was asked to end, before the connection is closed."""

SAVING_SECONDS = 600.0
"""For processes that save their state after Ctrl-C or a scheduler's signal."""

LOST = 255
"""ssh's own exit code: the connection failed, not the command."""

TICK_SECONDS = 0.05


@dataclass(frozen=True)
class Errand:
    """The command of one machine."""

    host: str
    command: Sequence[str]
    """On this machine; its standard streams are those of the remote command."""

    environment: Mapping[str, str]
    """For the remote command; it travels through standard input."""


def run_everywhere(errands: Sequence[Errand], *, fewest: int | None = None) -> int:
    """Run all to their end; return the exit code of the first that failed, else 0.

    Their output is passed on, each line after its host's name, and signals are passed to them.

    Args:
        errands: one for each machine, the first machine first.
        fewest: with that many machines left, the first among them, the others continue; without it
            all are needed.
    """
    group = _Group(errands, len(errands) if fewest is None else fewest)
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, group.note_signal) for number in handled}
    try:
        group.start()
        return group.wait()
    finally:
        for command in group.commands:
            command.close()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Group:
    """The commands of several machines."""

    def __init__(self, errands: Sequence[Errand], fewest: int) -> None:
        self._errands, self._fewest = errands, fewest
        self.commands: list[_Command] = []
        self._signals: list[signal.Signals] = []
        self._passed_on = 0
        self._failed: _Command | None = None
        self._deadline = float("inf")
        """When commands that still run are asked to end, and when their connection is closed."""

    def note_signal(self, number: int, _frame: object) -> None:
        """Store a signal, which the loop passes on."""
        if number == signal.SIGHUP and self._signals:
            return  # a terminal that is closed sends more than one
        self._signals.append(signal.Signals(number))

    def start(self) -> None:
        """Start all commands."""
        prefixed = len(self._errands) > 1
        self.commands = [_Command(errand, prefixed=prefixed) for errand in self._errands]

    def wait(self) -> int:
        """Wait for the end of all commands; return the exit code."""
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
            if self._signals or self._failed is not None:
                continue
            wrong_input = command.code == EXIT_USER_ERROR
            if not wrong_input and self.commands[0] in running and len(running) >= self._fewest:
                remark(f"{command.describe()}; {len(running)} of {len(self.commands)} continue")
                continue
            self._failed = command
            if not wrong_input:  # which has printed its error
                complain(f"{command.describe()}{'; the others are stopped' if running else ''}")
            self._deadline = time.monotonic() + HEARING_SECONDS


class _Command:
    """The command of one machine."""

    def __init__(self, errand: Errand, *, prefixed: bool) -> None:
        self.host = errand.host
        self.code: int | None = None
        self.noticed = False
        self._asked_to_end = False
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            errand.command, stdin=pipe, stdout=pipe, stderr=pipe, process_group=0
        )
        self.send(json.dumps(dict(errand.environment)))
        prefix = f"{errand.host}: ".encode() if prefixed else b""
        streams = ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
        self._threads = [
            threading.Thread(target=_pass_lines, args=(source, sink, prefix), daemon=True)
            for source, sink in streams
        ]
        for thread in self._threads:
            thread.start()

    def poll(self) -> int | None:
        """Its exit code, once it has one."""
        self.code = self._process.poll()
        return self.code

    @property
    def exit_code(self) -> int:
        """The launcher's exit code, if it is that of this command."""
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
        """Ask it to end; the second time close the connection, which ends it too."""
        if self._asked_to_end:
            self.close()
        self._asked_to_end = True
        self.send(signal.SIGTERM.name)

    def describe(self) -> str:
        """How it ended, as a clause."""
        if self.code == LOST:
            return f"{self.host}: the connection failed or was lost"
        code = self.exit_code
        if code > 128 and (number := code - 128) in set(signal.Signals):
            return f"{self.host} ended first, by {signal.Signals(number).name}"
        return f"{self.host} ended first, with exit code {code}"

    def finish_output(self) -> None:
        """Pass on all output, before the command's end is reported."""
        for thread in self._threads:
            thread.join(timeout=5)

    def close(self) -> None:
        """End the process on this machine; the remote side then ends by itself."""
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
    """Pass on whole lines, so that those of several machines don't mix."""
    for line in source:
        sink.buffer.write(prefix + line.rstrip(b"\n") + b"\n")  # pyright: ignore[reportAttributeAccessIssue]
        sink.flush()
