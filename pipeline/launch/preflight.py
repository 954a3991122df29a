"""Checks all machines of a job, and the routes between them, before it starts.

Each machine runs `python -m pipeline.launch.preflight`, which prints one line of JSON. The first
machine then listens on the rendezvous port until its standard input ends; the others try to connect
to it.
"""

import argparse
import hashlib
import json
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from threading import Thread

from pipeline.cli.options import complain, remark
from pipeline.launch.commands import NO_DIRECTORY, NO_PYTHON, host_command
from pipeline.launch.layout import Deployment, Host, Layout
from pipeline.launch.local import Gpu, query_gpus
from pipeline.system.errors import ConfigError
from pipeline.system.installation import OWN_PACKAGES, ROOT

PATIENCE_SECONDS = 30.0
"""Seconds for a machine to reply; starting Python from a slow file system takes time."""

CONNECT_SECONDS = 5.0

IN_USE = 0.1
"""Fraction of used GPU memory above which another job is assumed to use the GPU."""

PROBE = (sys.executable, "-m", "pipeline.launch.preflight")

MARK = "rlhf machine: "
"""Prefix of the JSON line, since a login shell may print a greeting first."""

CODE = "the code of this repository"
PACKAGES = ("torch", "transformers", "peft", "safetensors", "tokenizers", "datasets", "numpy")


@dataclass(frozen=True)
class Machine:
    """The report of one machine."""

    versions: dict[str, str]
    """Versions of Python and of packages, and a hash of this repository's code."""

    gpus: list[Gpu]

    shared: bool
    """Whether the machine sees the launcher's file in the output directory."""

    reaches: bool
    """Whether the machine reaches the port of the first machine."""

    port: int | None
    """A free port on the first machine, if possible the given one; None on other machines."""


def check_machines(where: Layout, deployment: Deployment, directory: Path) -> Layout:
    """Check the machines; return the layout, with a port that is free on the first machine.

    Args:
        where: the machines.
        deployment: the options; a port given there is not replaced.
        directory: output directory, which need not exist.

    Raises:
        ConfigError: there are problems; the message has a sentence for each.
    """
    directory = directory.expanduser().absolute()
    directory = next(parent for parent in (directory, *directory.parents) if parent.is_dir())
    with ExitStack() as stack:
        # Machines that see this file share the directory.
        try:
            mark = stack.enter_context(
                tempfile.NamedTemporaryFile(prefix=".seen-by-all-", dir=directory)
            ).name
        except OSError as error:
            raise ConfigError(f"{directory} is not writable: {error}") from None

        def probe(host: Host, *options: str) -> _Probe:
            words = [*PROBE, "--mark", mark, "--address", where.address, *options]
            words += ["--port", str(where.port)]
            started = _Probe(host, host_command(words, host, where, deployment))
            stack.callback(started.close)
            return started

        probes = [probe(where.hosts[0], "--first")]
        probes[0].wait()
        where = _with_port(where, probes[0], deployment)
        probes += [probe(host) for host in where.hosts[1:]]
        for started in probes[1:]:
            started.wait()
        found = {each.host: each.machine for each in probes if each.machine is not None}
        problems = [each.problem for each in probes if each.machine is None]
        for host, machine in found.items():
            first = next(iter(found.values()))
            any_gpus = any(other.gpus for other in found.values())
            problems += _compare_versions(host, machine, where.hosts[0], first)
            problems += _check_devices(host, machine) if any_gpus else []
            problems += _check_place(host, machine, directory, where)
    for problem in problems[:-1]:
        complain(f"error: {problem}")
    if problems:
        raise ConfigError(problems[-1])
    return where


class _Probe:
    """A running check of one machine."""

    def __init__(self, host: Host, command: Sequence[str]) -> None:
        self.host, self.command = host, command
        self.machine: Machine | None = None
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed in `close`
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            process_group=0,
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                values = json.loads(line.removeprefix(MARK))
                self.machine = Machine(**values | {"gpus": [Gpu(*gpu) for gpu in values["gpus"]]})
                return
        self._process.wait()

    def wait(self) -> None:
        """Wait until the machine has replied or failed, or until the timeout."""
        self._reader.join(PATIENCE_SECONDS)

    @property
    def problem(self) -> str:
        """The reason for a missing reply, and its fix."""
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
                f"{name} does not have this command's working directory; start in a directory that"
                " all machines share at the same path"
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
        """End the check, which releases its port."""
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=5 if self.machine is not None else 0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


def _with_port(where: Layout, first: _Probe, deployment: Deployment) -> Layout:
    """The layout with a port that is free on the first machine.

    Raises:
        ConfigError: the port given in the options is taken.
    """
    port = first.machine.port if first.machine is not None else None
    if port is None or port == where.port:
        return where
    if deployment.master_port is not None:
        raise ConfigError(
            f"--master-port {where.port} is in use on {first.host.name}; choose another, or omit it"
        )
    remark(f"port {where.port} of {first.host.name} is in use; using port {port}")
    return replace(where, port=port)


# Problems and their fixes, one sentence each


def _compare_versions(host: Host, machine: Machine, first: Host, other: Machine) -> Iterator[str]:
    for name, version in machine.versions.items():
        if version != other.versions[name]:
            yield (
                f"{name} is {version} on {host.name} and {other.versions[name]} on {first.name};"
                " install the same on all machines"
            )


def _check_devices(host: Host, machine: Machine) -> Iterator[str]:
    if max(host.slots) >= len(machine.gpus):
        yield (
            f"{host.name} has {len(machine.gpus)} GPUs, but slot {max(host.slots)} is"
            f" requested{f' ({host.place})' if host.place else ''}; correct its slots, or check its"
            " driver with nvidia-smi"
        )
        return
    for slot in host.slots:
        gpu = machine.gpus[slot]
        if gpu.used_mib > IN_USE * gpu.total_mib:
            yield (
                f"GPU {slot} of {host.name} has {gpu.used_mib / 1024:.1f} of"
                f" {gpu.total_mib / 1024:.0f} GiB in use; stop that job, or exclude the GPU with"
                f" --exclude {host.name}:{slot}"
            )


def _check_place(host: Host, machine: Machine, directory: Path, where: Layout) -> Iterator[str]:
    if not machine.shared:
        yield (
            f"{host.name} can't access this machine's {directory}; put --output-dir on a file"
            " system that all machines share, at the same path"
        )
    if not machine.reaches:
        yield (
            f"{host.name} can't reach port {where.port} of {where.address}; check that the name"
            " resolves to the first machine there, open the ports above 1024 between the machines,"
            " or pass another --master-addr or --master-port"
        )


# The report of a machine


def main(argv: Sequence[str]) -> None:
    """Print the report of this machine; keep the port open until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.launch.preflight")
    parser.add_argument("--mark", type=Path, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--first", action="store_true")
    args = parser.parse_args(argv)
    packages = {name: _package_version(name) for name in PACKAGES}
    with ExitStack() as held:
        machine = Machine(
            versions={"Python": platform.python_version(), **packages, CODE: _code_hash()},
            gpus=query_gpus(),
            shared=args.mark.is_file(),
            reaches=args.first or _reaches(args.address, args.port),
            port=_listen(args.port, held) if args.first else None,
        )
        sys.stdout.write(f"{MARK}{json.dumps(asdict(machine))}\n")
        sys.stdout.flush()
        if args.first:
            sys.stdin.read()


def _code_hash() -> str:
    """SHA-256 of the code of this repository."""
    digest = hashlib.sha256()
    files = [ROOT / "train.py"]
    for package in OWN_PACKAGES:
        files += [file for file in (ROOT / package).rglob("*") if file.suffix in (".py", ".jinja")]
    for file in sorted(files):
        digest.update(str(file.relative_to(ROOT)).encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _package_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _listen(port: int, held: ExitStack) -> int:
    """Listen on the port, or on another one if it is taken; return its number."""
    for wanted in (port, 0):
        server = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", wanted))
        except OSError:
            continue
        server.listen()
        return server.getsockname()[1]
    return port


def _reaches(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=CONNECT_SECONDS):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
