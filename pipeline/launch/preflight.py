"""Looks at all machines of a job before it starts, and at the way between them.

Each machine runs `pipeline.launch.probe`, the first one first: it holds the port at which the
processes will meet, and the others try to reach it.
"""

import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.cli import complain, remark
from pipeline.errors import ConfigError
from pipeline.launch.deployment import Deployment
from pipeline.launch.findings import problems, table
from pipeline.launch.hosts import THIS_MACHINE, Host
from pipeline.launch.layout import Layout
from pipeline.launch.probe import MARK, Machine
from pipeline.launch.reach import NO_DIRECTORY, NO_PYTHON, host_command

PATIENCE_SECONDS = 30.0
"""For a machine to answer; a Python of a slow file system takes its time."""

PROBE = (sys.executable, "-m", "pipeline.launch.probe")


@dataclass(frozen=True)
class Check:
    """What was found."""

    where: Layout
    """Where the processes are to run, with a port that is free."""

    table: Sequence[str]
    problems: Sequence[str]


def look(where: Layout, deployment: Deployment, directory: Path) -> Check:
    """Look at all machines, or at this one where processes are started by hand or run here alone.

    Args:
        where: where the processes are to run.
        deployment: the options; a port that they name is not replaced.
        directory: of the output; it need not be there yet.
    """
    meets = where.by in ("ssh", "slurm")
    hosts = where.hosts if meets else (_this_machine(where, deployment),)
    with _mark_in(_nearest(directory)) as mark:

        def probe_of(host: Host, *options: str) -> _Probe:
            words = [*PROBE, "--mark", str(mark), *(options if meets else ())]
            return _Probe(host, host_command(words, host, where, deployment))

        way = ["--address", where.address, "--port"]
        holder = probe_of(hosts[0], *way, str(where.port), "--first")
        probes = [holder]
        try:
            holder.wait()
            where = _with_port(where, holder, deployment)
            probes += [probe_of(host, *way, str(where.port)) for host in hosts[1:]]
            for probe in probes[1:]:
                probe.wait()
        finally:
            for probe in probes:
                probe.close()
        silent = [probe.problem for probe in probes if probe.machine is None]
        machines = {probe.host: probe.machine for probe in probes if probe.machine is not None}
        clocks = {probe.host: probe.clock for probe in probes}
        found = list(silent)
        if machines:
            found += problems(
                machines,
                where,
                mark=mark.read_text(),
                directory=str(mark.parent),
                clocks=clocks,
            )
    return Check(where, table(machines, clocks) if machines else [], found)


def insist(check: Check) -> Layout:
    """Where the processes are to run, if nothing stands in the way.

    Raises:
        ConfigError: something does; all that was found is shown, a sentence each.
    """
    for problem in check.problems[:-1]:
        complain(f"error: {problem}")
    if check.problems:
        raise ConfigError(check.problems[-1])
    return check.where


class _Probe:
    """The look at one machine."""

    def __init__(self, host: Host, command: Sequence[str]) -> None:
        self.host = host
        self.command = command
        self.machine: Machine | None = None
        self.clock = 0.0
        self._sent = time.time()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self._deadline = time.monotonic() + PATIENCE_SECONDS

    def wait(self) -> None:
        """Until the machine has answered, or won't."""
        while self.machine is None:
            try:
                line = self._lines.get(timeout=max(0.0, self._deadline - time.monotonic()))
            except queue.Empty:
                return
            if line is None:
                return
            if line.startswith(MARK):
                self.machine = Machine.from_line(line.removeprefix(MARK))
                answered = time.time()
                # The machine's clock was read at some moment in between.
                ahead, behind = self.machine.time - answered, self.machine.time - self._sent
                self.clock = max(ahead, 0.0) + min(behind, 0.0)

    @property
    def problem(self) -> str:
        """Why there is no answer, and the mend."""
        name, code = self.host.name, self._process.poll()
        place = f" ({self.host.place})" if self.host.place else ""
        message = next((line for line in reversed(self._errors) if line.strip()), "").strip()
        if code == 255:
            return (
                f"{name}{place} can't be reached: {message or 'ssh failed'};"
                f" `{self._by_hand()}` must work without a password"
            )
        if code is not None and code in NOT_THERE:
            return f"{name} {NOT_THERE[code]}"
        if code == 1 and "No module named" in message:
            return (
                f"{name} can't run this code: {message}; install the same environment and check out"
                " the same commit there, at the same paths"
            )
        if code is None or code < 0:
            return (
                f"{name}{place} has not answered within {PATIENCE_SECONDS:.0f} s; try"
                f" `{self._by_hand()}`"
            )
        return f"{name} could not be asked (exit code {code}): {message or 'it message nothing'}"

    def _by_hand(self) -> str:
        return f"{' '.join(self.command[:-1])} true"

    def close(self) -> None:
        """End it; what it held is free again."""
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=5 if self.machine is not None else 0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors += self._process.stderr


NOT_THERE: Mapping[int, str] = {
    NO_DIRECTORY: "does not have the directory that this command runs in; start it in one that is"
    " shared by all machines, at the same path",
    NO_PYTHON: "does not have this Python; install the same environment at the same path",
}
"""What a machine lacks, by the exit code of the line that runs the probe."""


def _this_machine(where: Layout, deployment: Deployment) -> Host:
    """This machine with the slots that it is to use."""
    own = where.hosts[deployment.node_rank or 0] if where.hosts else Host("", (0,))
    return replace(own, name=THIS_MACHINE[0])


def _with_port(where: Layout, first: _Probe, deployment: Deployment) -> Layout:
    """The layout with a port that is free on the first machine.

    Raises:
        ConfigError: the port that the options name is taken.
    """
    port = first.machine.port if first.machine is not None else None
    if port is None or port == where.port:
        return where
    if deployment.master_port is not None:
        raise ConfigError(
            f"--master-port {where.port} is taken on {first.host.name}; choose another, or omit it"
        )
    remark(f"port {where.port} of {first.host.name} is taken; processes meet at port {port}")
    return replace(where, port=port)


@contextmanager
def _mark_in(directory: Path) -> Iterator[Path]:
    """A file by which other machines can tell that they see the same directory."""
    word = secrets.token_hex(8)
    mark = directory / f".seen-by-all-{word}"
    try:
        mark.write_text(word, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{directory} can't be written: {error}") from None
    try:
        yield mark
    finally:
        mark.unlink(missing_ok=True)


def _nearest(directory: Path) -> Path:
    """The directory, or the one above it that is there."""
    directory = directory.expanduser().absolute()
    return next(each for each in (directory, *directory.parents) if each.is_dir())
