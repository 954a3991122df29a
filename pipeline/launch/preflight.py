"""Check all machines of a job before it starts.

Each machine runs `python -m pipeline.launch.preflight FILE`, which prints one line of JSON.
"""

import hashlib
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from pipeline.cli.options import print_error
from pipeline.launch.commands import MISSING_REASONS, host_command
from pipeline.launch.layout import Deployment, Host, Layout
from pipeline.launch.local import Gpu, query_gpus
from pipeline.system.errors import ConfigError, counted
from pipeline.system.installation import OWN_PACKAGES, ROOT

TIMEOUT_SECONDS = 30.0
"""Time limit for a machine's reply; starting Python from a slow file system takes time."""

MAX_USED_FRACTION = 0.1
"""Fraction of used GPU memory above which another job is assumed to use the GPU."""

REPORT_PREFIX = "rlhf machine: "
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
    """Whether the machine can access the launcher's file in the output directory."""


def check_machines(layout: Layout, deployment: Deployment, directory: Path) -> None:
    """Check the machines; pods are not checked, since they share one image and one volume.

    `directory` is the output directory, which need not exist.

    Raises:
        ConfigError: there are problems; the message states the last, and the others are printed.
    """
    if layout.launcher == "pod":
        return
    directory = directory.expanduser().absolute()
    directory = next(parent for parent in (directory, *directory.parents) if parent.is_dir())
    try:  # machines that see this file share the directory
        marker = tempfile.NamedTemporaryFile(prefix=".seen-by-all-", dir=directory)  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"{directory} is not writable: {error}") from None
    with marker, ThreadPoolExecutor(len(layout.hosts)) as pool:
        command = (sys.executable, "-m", "pipeline.launch.preflight", marker.name)
        commands = [host_command(command, host, layout, deployment) for host in layout.hosts]
        replies = dict(zip(layout.hosts, pool.map(_probe, layout.hosts, commands), strict=True))
    machines = {host: reply for host, reply in replies.items() if isinstance(reply, Machine)}
    problems = [reply for reply in replies.values() if isinstance(reply, str)]
    has_gpus = any(machine.gpus for machine in machines.values())
    for host, machine in machines.items():
        problems += _compare_versions(host, machine, *next(iter(machines.items())))
        problems += _check_devices(host, machine) if has_gpus else []
        if not machine.shared:
            problems.append(
                f"{host.name} can't access this machine's {directory}; put --output-dir on a file"
                " system that all machines share, at the same path"
            )
    for problem in problems[:-1]:
        print_error(f"error: {problem}")
    if problems:
        raise ConfigError(problems[-1])


def _probe(host: Host, command: Sequence[str]) -> Machine | str:
    """Return a machine's report, or the reason why there is none and how to fix it."""
    location = f" ({host.location})" if host.location else ""
    manual = f"`{' '.join(command[:-1])} true`"
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{host.name}{location} did not reply within {TIMEOUT_SECONDS:.0f} s; try {manual}"
    for line in result.stdout.splitlines():
        if line.startswith(REPORT_PREFIX):
            values = json.loads(line.removeprefix(REPORT_PREFIX))
            return Machine(**values | {"gpus": [Gpu(*gpu) for gpu in values["gpus"]]})
    message = (result.stderr.strip().splitlines() or [""])[-1].strip()
    code = result.returncode
    if code == 255:
        return (
            f"{host.name}{location} can't be reached: {message or 'ssh failed'}; {manual} must work"
            " without a password"
        )
    if code in MISSING_REASONS:
        return f"{host.name} {MISSING_REASONS[code]}"
    return (
        f"{host.name} can't run this code (exit code {code}): {message or 'no message'}; install"
        " the same environment and check out the same commit there, at the same paths"
    )


def _compare_versions(host: Host, machine: Machine, first: Host, other: Machine) -> Iterator[str]:
    for name, version in machine.versions.items():
        if version != other.versions[name]:
            yield (
                f"{name} is {version} on {host.name} and {other.versions[name]} on {first.name};"
                " install the same version on all machines"
            )


def _check_devices(host: Host, machine: Machine) -> Iterator[str]:
    if max(host.slots) >= (count := len(machine.gpus)):
        yield (
            f"{host.name} has {counted(count, 'GPU')}, but slot {max(host.slots)} is"
            f" requested{f' ({host.location})' if host.location else ''}; correct the slots, or"
            " check the host's driver with nvidia-smi"
        )
        return
    for slot in host.slots:
        gpu = machine.gpus[slot]
        if gpu.used_mib > MAX_USED_FRACTION * gpu.total_mib:
            yield (
                f"GPU {slot} of {host.name} has {gpu.used_mib / 1024:.1f} of"
                f" {gpu.total_mib / 1024:.0f} GiB in use; stop the other job, or exclude this GPU"
                f" with --exclude {host.name}:{slot}"
            )


def main(marker: Path) -> None:
    """Print the report of this machine; `marker` is the launcher's file in the output directory."""
    packages = {name: _package_version(name) for name in PACKAGES}
    machine = Machine(
        versions={"Python": platform.python_version(), **packages, CODE: _code_hash()},
        gpus=query_gpus(),
        shared=marker.is_file(),
    )
    sys.stdout.write(f"{REPORT_PREFIX}{json.dumps(asdict(machine))}\n")


def _code_hash() -> str:
    """Return a short SHA-256 of this repository's code."""
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
