"""Command lines that run a step, here or on another machine, and their environment."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from pipeline.launch.layout import Deployment, Host, Layout, is_this_machine, spelled
from pipeline.launch.local import list_gpus
from pipeline.system.installation import ROOT
from pipeline.system.threads import share_of_cores, shorten_spinning

TORCHRUN = ("-m", "pipeline.launch.torchrun")
REMOTE = (sys.executable, "-m", "pipeline.launch.remote")

NO_DIRECTORY, NO_PYTHON = 120, 121
"""Exit codes if a machine lacks the directory or Python."""

MISSING = {
    NO_DIRECTORY: "does not have this command's working directory; start in a directory that all"
    " machines share at the same path",
    NO_PYTHON: "does not have this Python; install the same environment at the same path",
}
"""Clauses that follow the name of such a machine."""


def step_command(
    module: str, config_file: Path, where: Layout, deployment: Deployment
) -> list[str]:
    """The command line on this machine that runs a step."""
    return launch_command(step_words(module, config_file), where, deployment)


def step_words(module: str, config_file: Path) -> list[str]:
    """Arguments of a step's command line after Python or torchrun."""
    return ["-m", module, "--config", str(config_file)]


def launch_command(step: Sequence[str], where: Layout, deployment: Deployment) -> list[str]:
    """The command line on this machine that runs `-m module ...` on all machines."""
    match where.by:
        case "process":
            return [sys.executable, *step]
        case "node":
            return _torchrun(step, where.hosts[0], ["--standalone"])
        case "slurm":
            return srun_command(step, where)
        case "pod":
            return node_command(step, where, where.rank)
        case "ray":
            nodes, each = len(where.hosts), len(where.hosts[0].slots)
            options = f"--deployment-type ray --num-nodes {nodes} --num-gpus {each}".split()
        case "ssh":
            options = [*given_options(deployment), "--no-check"]
    return [sys.executable, "-m", "pipeline.launch.cluster", *options, *step]


def node_command(step: Sequence[str], where: Layout, rank: int) -> list[str]:
    """The command line that runs the processes on one of several machines."""
    return _torchrun(step, where.hosts[rank], _rendezvous(where, rank))


def _rendezvous(where: Layout, rank: int | str) -> list[str]:
    """Torchrun's rendezvous options for machine number `rank`."""
    return [
        *("--nnodes", str(len(where.hosts)), "--node-rank", str(rank)),
        *("--master-addr", where.address, "--master-port", str(where.port)),
    ]


def srun_command(step: Sequence[str], where: Layout) -> list[str]:
    """The command line with which SLURM starts torchrun once on each machine of the allocation.

    srun labels the output by machine, forwards signals, names a failed task, and ends all others.
    """
    rank = "$SLURM_NODEID"
    words = _torchrun(step, where.hosts[0], _rendezvous(where, rank))
    line = " ".join(rank if word == rank else shlex.quote(word) for word in words)
    return [
        *("srun", "--nodes", str(len(where.hosts)), "--ntasks-per-node", "1", "--label"),
        *("--kill-on-bad-exit=1", "--quit-on-interrupt", "--cpu-bind", "none"),
        *("bash", "-c", f"exec {line}"),
    ]


def host_command(
    command: Sequence[str], host: Host, where: Layout, deployment: Deployment
) -> list[str]:
    """The command line on this machine that runs another command on a host, by ssh or srun.

    It runs there in the directory of the same name, with this repository's packages on its path.
    """
    line = shell_line(command)
    if where.by == "slurm":
        one = ["--nodes", "1", "--ntasks", "1", "--nodelist", host.name, "--overlap"]
        return ["srun", *one, "--cpu-bind", "none", "sh", "-c", line]
    if is_this_machine(host.name):
        return ["sh", "-c", line]
    return [*shlex.split(deployment.ssh_command), host.name, line]


def shell_line(command: Sequence[str]) -> str:
    """The line for another machine's shell that runs a command in this directory."""
    python = shlex.quote(sys.executable)
    return (
        f"cd {shlex.quote(str(Path.cwd()))} || exit {NO_DIRECTORY};"
        f" test -x {python} || exit {NO_PYTHON};"
        f" exec env {shlex.quote(f'PYTHONPATH={ROOT}')} {shlex.join(command)}"
    )


def given_options(deployment: Deployment) -> list[str]:
    """Command-line words of launcher options that differ from the defaults, except `no_check`."""
    words: list[str] = []
    for each in fields(Deployment):
        value = getattr(deployment, each.name)
        if each.name in ("deployment_type", "no_check") or value == each.default:
            continue
        words += [spelled(each.name)] if value is True else [spelled(each.name), str(value)]
    return words


def step_environment(where: Layout, deployment: Deployment) -> Mapping[str, str]:
    """The environment of the command on this machine, with our packages first on its path.

    The path excludes the working directory, where a folder may have the same name as one of them.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    environment["PYTHONSAFEPATH"] = "1"
    if where.by == "process":
        environment.setdefault("OMP_NUM_THREADS", str(share_of_cores(1)))
    shorten_spinning(environment)
    if where.by == "node" and (deployment.filters or not where.hosts[0].is_whole):
        environment |= visible_devices(where.hosts[0])
    return environment


def list_devices(host: Host, deployment: Deployment) -> list[str]:
    """The GPUs used by a host's processes, as named by `list_gpus`, if the host is this machine.

    Empty if it has none.
    """
    if deployment.filters or not host.is_whole:
        return [str(slot) for slot in host.slots] if list_gpus(hidden=True) else []
    return list_gpus()[: len(host.slots)]


def visible_devices(host: Host) -> Mapping[str, str]:
    """The environment variable that restricts a process to the devices in use on a host."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(slot) for slot in host.slots)}


def _torchrun(step: Sequence[str], host: Host, rendezvous: Sequence[str]) -> list[str]:
    processes = ["--nproc-per-node", str(len(host.slots))]
    return [sys.executable, *TORCHRUN, *rendezvous, *processes, *step]
