"""Checks all machines of a job, and the routes between them, before it starts.

Each machine runs `pipeline.launch.probe`, the first one first: it holds the port at which the
processes will meet, and the others try to reach it.
"""

import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.cli import complain, remark
from pipeline.errors import ConfigError
from pipeline.launch.commands import NO_DIRECTORY, NO_PYTHON, host_command
from pipeline.launch.deployment import Deployment
from pipeline.launch.layout import THIS_MACHINE, Host, Layout
from pipeline.launch.probe import MARK, Machine

PATIENCE_SECONDS = 30.0
"""For a machine to answer; starting Python from a slow file system takes time."""

CLOCK_SECONDS = 30.0
"""By which clocks may differ: people compare the logs and file times of several machines."""

DISK_BYTES = 2**30
"""Free, at least."""

IN_USE = 0.1
"""Share of a GPU's memory from which another job is assumed to use it."""

PROBE = (sys.executable, "-m", "pipeline.launch.probe")


@dataclass(frozen=True)
class Check:
    """The result of a preflight."""

    where: Layout
    """Where the processes are to run, with a port that is free."""

    table: Sequence[str]
    problems: Sequence[str]


def look(where: Layout, deployment: Deployment, directory: Path) -> Check:
    """Check all machines, or this one where processes are started by hand or only run here.

    Args:
        where: where the processes are to run.
        deployment: the options; a port that they name is not replaced.
        directory: of the output; it need not exist.
    """
    meets = where.by in ("ssh", "slurm")
    own = where.hosts[deployment.node_rank or 0] if where.hosts else Host("", (0,))
    hosts = where.hosts if meets else (replace(own, name=THIS_MACHINE[0]),)
    with ExitStack() as stack:
        mark = stack.enter_context(_mark_in(_existing_parent(directory)))
        stack.callback((pool := ThreadPoolExecutor(len(hosts))).shutdown)

        def probe(host: Host, *options: str) -> _Probe:
            words = [*PROBE, "--mark", str(mark), *(options if meets else ())]
            each = _Probe(host, host_command(words, host, where, deployment), pool)
            stack.callback(each.close)
            return each

        address = ["--address", where.address, "--port"]
        probes = [probe(hosts[0], *address, str(where.port), "--first")]
        probes[0].wait()
        where = _with_port(where, probes[0], deployment)
        probes += [probe(host, *address, str(where.port)) for host in hosts[1:]]
        for each in probes[1:]:
            each.wait()
        found = {each: each.machine for each in probes if each.machine is not None}
        problems = [each.problem for each in probes if each.machine is None]
        for each, machine in found.items():
            first = next(iter(found.values()))
            any_gpus = any(other.gpus for other in found.values())
            problems += _versions(each.host, machine, hosts[0], first)
            problems += _devices(each.host, machine) if any_gpus else []
            problems += _place(each, machine, mark)
            problems += _route(each.host, machine, where) if machine is not first else []
    return Check(where, [*_table(found)] if found else [], problems)


def insist(check: Check) -> Layout:
    """Where the processes are to run, if there is no problem.

    Raises:
        ConfigError: there are problems; each is shown in a sentence.
    """
    for problem in check.problems[:-1]:
        complain(f"error: {problem}")
    if check.problems:
        raise ConfigError(check.problems[-1])
    return check.where


class _Probe:
    """The check of one machine."""

    def __init__(self, host: Host, command: Sequence[str], pool: ThreadPoolExecutor) -> None:
        self.host, self.command = host, command
        self.machine: Machine | None = None
        self.clock = 0.0
        self._sent = time.time()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `close`
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            process_group=0,
        )
        self._reading = pool.submit(self._read)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self.machine = Machine.from_line(line.removeprefix(MARK))
                # The machine's clock was read at some moment between the request and now.
                ahead, behind = self.machine.time - time.time(), self.machine.time - self._sent
                self.clock = max(ahead, 0.0) + min(behind, 0.0)
                return
        self._process.wait()

    def wait(self) -> None:
        """Wait until the machine has answered or failed, or the time is up."""
        with suppress(Late):
            self._reading.result(PATIENCE_SECONDS)

    @property
    def problem(self) -> str:
        """Why there is no answer, and the fix."""
        name, code = self.host.name, self._process.poll()
        place = f" ({self.host.place})" if self.host.place else ""
        by_hand = f"`{' '.join(self.command[:-1])} true`"
        self._errors.seek(0)
        message = (self._errors.read().strip().splitlines() or [""])[-1].strip()
        if code == 255:
            return (
                f"{name}{place} can't be reached: {message or 'ssh failed'}; {by_hand} must work"
                " without a password"
            )
        if code == NO_DIRECTORY:
            return (
                f"{name} does not have the directory that this command runs in; start it in one"
                " that is shared by all machines, at the same path"
            )
        if code == NO_PYTHON:
            return (
                f"{name} does not have this Python; install the same environment at the same path"
            )
        if code is None or code < 0:
            return f"{name}{place} has not answered within {PATIENCE_SECONDS:.0f} s; try {by_hand}"
        return (
            f"{name} can't run this code (exit code {code}): {message or 'no message'}; install the"
            " same environment and check out the same commit there, at the same paths"
        )

    def close(self) -> None:
        """End it, which frees the port that it held."""
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=5 if self.machine is not None else 0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reading.result()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


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
    """A file that shows whether other machines see the same directory."""
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


def _existing_parent(directory: Path) -> Path:
    directory = directory.expanduser().absolute()
    return next(each for each in (directory, *directory.parents) if each.is_dir())


# Problems, each in one sentence with its fix


def _versions(host: Host, machine: Machine, first: Host, other: Machine) -> Iterator[str]:
    for name, version in machine.versions.items():
        if version == other.versions[name]:
            continue
        if name == "code":
            yield (
                f"the code of this repository on {host.name} is not that on {first.name}; check out"
                " the same commit, without changes, on all machines"
            )
        else:
            yield (
                f"{name} is {version} on {host.name} and {other.versions[name]} on {first.name};"
                " install the same on all machines"
            )


def _devices(host: Host, machine: Machine) -> Iterator[str]:
    if max(host.slots) >= len(machine.gpus):
        yield (
            f"{host.name} has {len(machine.gpus)} GPUs, and slot {max(host.slots)} is required"
            f"{f' ({host.place})' if host.place else ''}; correct its slots, or check its driver"
            " with nvidia-smi"
        )
        return
    for slot in host.slots:
        gpu = machine.gpus[slot]
        if gpu.used_mib > IN_USE * gpu.total_mib:
            yield (
                f"GPU {slot} of {host.name} has {gpu.used_mib / 1024:.1f} of"
                f" {gpu.total_mib / 1024:.0f} GiB in use; end that job, or leave the GPU out with"
                f" --exclude {host.name}:{slot}"
            )


def _place(probe: _Probe, machine: Machine, mark: Path) -> Iterator[str]:
    name, directory = probe.host.name, mark.parent
    if machine.shared != mark.read_text():
        yield (
            f"{name} does not see this machine's {directory}; put --output-dir on a file system"
            " that all machines share, at the same path"
        )
    elif machine.disk_bytes < DISK_BYTES:
        yield (
            f"{directory} has {machine.disk_bytes / 2**20:.0f} MiB free on {name}; make room, or"
            " choose another --output-dir"
        )
    if abs(probe.clock) > CLOCK_SECONDS:
        direction = "ahead" if probe.clock > 0 else "behind"
        yield (
            f"the clock of {name} is {abs(probe.clock):.0f} s {direction}; set it, with NTP on all"
            " machines"
        )


def _route(host: Host, machine: Machine, where: Layout) -> Iterator[str]:
    own = machine.own_address
    if own is None:
        yield (
            f"{host.name} can't resolve {where.address}, or has no route to it; give --master-addr,"
            " an address of the first machine that all machines reach"
        )
    elif own.startswith("127.") and not where.address.startswith("127."):
        yield (
            f"on {host.name} the name {where.address} means {host.name} itself; correct its"
            " /etc/hosts, or give --master-addr, an address of the first machine"
        )
    elif machine.reaches is False:
        yield (
            f"{host.name} can't reach port {where.port} of {where.address}; open it and the ports"
            " above 1024 between the machines, or give another --master-port or --master-addr"
        )


def _table(machines: Mapping[_Probe, Machine]) -> Iterator[str]:
    """The machines side by side."""
    width = max(len("machine"), *(len(probe.host.name) for probe in machines))
    yield (
        f"{'machine':<{width}}  {'python':<8} {'torch':<14} {'processes':>9}  {'GPUs':<26}"
        f" {'memory':>9} {'disk':>9} {'clock':>7}"
    )
    for probe, machine in machines.items():
        gpus = "none"
        if machine.gpus:
            kinds = sorted({gpu.name for gpu in machine.gpus})
            smallest = min(gpu.total_mib for gpu in machine.gpus) / 1024
            gpus = f"{len(machine.gpus)} x {', '.join(kinds)}, {smallest:.0f} GiB"
        yield (
            f"{probe.host.name:<{width}}  {machine.versions['Python']:<8}"
            f" {machine.versions['torch']:<14} {len(probe.host.slots):>9}  {gpus:<26}"
            f" {machine.memory_bytes / 2**30:>5.0f} GiB {machine.disk_bytes / 2**30:>5.0f} GiB"
            f" {probe.clock:>+5.0f} s"
        )
