"""One command on each of several machines: its output passed on, all ended when one ends badly."""

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
"""For the other machines to end by themselves, as their processes do when they hear of a failure;
then they are told to."""

GRACE_SECONDS = 30.0
"""For a machine that was asked to end; then the connection is closed."""

SAVING_SECONDS = 600.0
"""For processes that save their state after Ctrl-C or a scheduler's signal."""

LOST = 255
"""ssh's own exit code: it was the way that failed, not the command."""

TICK_SECONDS = 0.05


@dataclass(frozen=True)
class Errand:
    """What is to run on one machine."""

    host: str
    command: Sequence[str]
    """On this machine, its standard input and output being those of the other one."""

    environment: Mapping[str, str]
    """For the command on the other machine; it travels through standard input."""


def run_everywhere(errands: Sequence[Errand], *, fewest: int | None = None) -> int:
    """Run all to their end; return the exit code of the first that failed, else 0.

    What each writes goes where ours goes, each line after its host's name. Signals are passed on.

    Args:
        errands: one for each machine, the first machine first.
        fewest: with that many machines left, the first among them, the others go on; without it all
            are needed.
    """
    group = _Group(errands, len(errands) if fewest is None else fewest)
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, group.hear) for number in heard}
    try:
        group.start()
        return group.wait()
    finally:
        group.close()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Group:
    """The commands of several machines."""

    def __init__(self, errands: Sequence[Errand], fewest: int) -> None:
        self.errands = errands
        self.fewest = fewest
        self.commands: list[_Command] = []
        self.signals_received: list[signal.Signals] = []
        self._passed_on = 0
        self._first_bad: _Command | None = None
        self._deadline = float("inf")
        """When processes that still run are asked to end, and when the connection is closed."""

    def hear(self, number: int, _frame: object) -> None:
        """A signal for all machines; the loop passes it on."""
        if number == signal.SIGHUP and self.signals_received:
            return  # a terminal that is closed says so more than once
        self.signals_received.append(signal.Signals(number))

    def start(self) -> None:
        names = len(self.errands) > 1
        self.commands = [_Command(errand, prefixed=names) for errand in self.errands]

    def wait(self) -> int:
        beat = time.monotonic()
        while running := [each for each in self.commands if each.ended() is None]:
            self._pass_on(running)
            if time.monotonic() >= beat:
                beat += HEARTBEAT_SECONDS
                for command in running:
                    command.say("")
            self._look(running)
            time.sleep(TICK_SECONDS)
        self._look([])
        for command in self.commands:
            command.finish()
        return self._verdict()

    def close(self) -> None:
        """Leave nothing behind, whatever has happened."""
        for command in self.commands:
            command.close()

    def _pass_on(self, running: Sequence["_Command"]) -> None:
        for number in self.signals_received[self._passed_on :]:
            self._passed_on += 1
            name = number.name if number in STOP_SIGNALS else signal.SIGINT.name
            for command in running:
                command.say(name)
            aborts = number == signal.SIGINT and self._passed_on > 1
            patience = GRACE_SECONDS if aborts else SAVING_SECONDS
            self._deadline = time.monotonic() + patience

    def _look(self, running: Sequence["_Command"]) -> None:
        """See who has ended badly; then end the others."""
        for command in self.commands:
            if not command.code or command.noticed:
                continue
            command.noticed = True
            command.finish()
            if self.signals_received or self._first_bad is not None:
                continue
            if self._can_go_on(running, command):
                remark(f"{command.describe()}; {len(running)} of {len(self.commands)} go on")
                continue
            self._first_bad = command
            if command.code != EXIT_USER_ERROR:  # which has printed what is wrong
                complain(f"{command.describe()}{'; the others are stopped' if running else ''}")
            self._deadline = time.monotonic() + HEARING_SECONDS
        if time.monotonic() < self._deadline:
            return
        self._deadline = time.monotonic() + GRACE_SECONDS
        for command in running:
            command.end()

    def _can_go_on(self, running: Sequence["_Command"], ended: "_Command") -> bool:
        """Whether enough machines are left, the first one, where they meet, among them."""
        first = self.commands[0]
        return (
            ended is not first
            and first in running
            and len(running) >= self.fewest
            and ended.code != EXIT_USER_ERROR
        )

    def _verdict(self) -> int:
        if self._first_bad is not None:
            return self._first_bad.exit_code
        if self.signals_received:
            return next((each.exit_code for each in self.commands if each.exit_code), 0)
        return self.commands[0].exit_code


class _Command:
    """The command of one machine."""

    def __init__(self, errand: Errand, *, prefixed: bool) -> None:
        self.host = errand.host
        self.code: int | None = None
        self.noticed = False
        self._ended_by_signal = False
        self._process = subprocess.Popen(
            errand.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        self.say(json.dumps(dict(errand.environment)))
        prefix = f"{errand.host}: ".encode() if prefixed else b""
        streams = ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
        self._threads = [
            threading.Thread(target=_pass_lines, args=(source, sink, prefix), daemon=True)
            for source, sink in streams
        ]
        for thread in self._threads:
            thread.start()

    def ended(self) -> int | None:
        """Its exit code, once it has one."""
        self.code = self._process.poll()
        return self.code

    @property
    def exit_code(self) -> int:
        """Ours, if it is to be that of this command."""
        code = self.code or 0
        if code == LOST:
            return 1
        return code if code >= 0 else 128 - code

    def say(self, line: str) -> None:
        """A line for the other end, if it is still there."""
        if self._process.stdin is not None:
            with suppress(OSError, ValueError):
                self._process.stdin.write(f"{line}\n".encode())
                self._process.stdin.flush()

    def end(self) -> None:
        """Tell it to end; the second time close the way to it, which ends it too."""
        if self._ended_by_signal:
            self.close()
        self._ended_by_signal = True
        self.say(signal.SIGTERM.name)

    def describe(self) -> str:
        """How it ended, as a clause."""
        if self.code == LOST:
            return f"{self.host}: the connection failed or was lost"
        code = self.exit_code
        if code > 128 and (number := code - 128) in set(signal.Signals):
            return f"{self.host} ended first, by {signal.Signals(number).name}"
        return f"{self.host} ended first, with exit code {code}"

    def finish(self) -> None:
        """Have all that it wrote passed on, before its end is reported."""
        for thread in self._threads:
            thread.join(timeout=5)

    def close(self) -> None:
        """End what runs on this machine; the other end then notices by itself."""
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
    """Whole lines, so that those of several machines don't mix."""
    for line in source:
        sink.buffer.write(prefix + line.rstrip(b"\n") + b"\n")  # pyright: ignore[reportAttributeAccessIssue]
        sink.flush()
