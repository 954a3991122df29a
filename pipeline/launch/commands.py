"""Command lines that run a step, here or on another machine, and their environment."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from pipeline.cli.options import option_name
from pipeline.launch.layout import Deployment, Host, Layout, is_this_machine
from pipeline.launch.local import list_gpus
from pipeline.system.installation import ROOT
from pipeline.system.threads import cores_per_process, shorten_spinning

TORCHRUN = ("-m", "pipeline.launch.torchrun")
REMOTE = (sys.executable, "-m", "pipeline.launch.remote")

NO_DIRECTORY, NO_PYTHON = 120, 121
"""Exit codes if a machine lacks the directory or Python."""

MISSING_REASONS = {
    NO_DIRECTORY: "does not have this command's working directory; start in a directory that all"
    " machines share at the same path",
    NO_PYTHON: "does not have this Python; install the same environment at the same path",
}
"""Error messages for these codes, which follow the name of the machine."""


def step_command(
    module: str, config_file: Path, layout: Layout, deployment: Deployment
) -> list[str]:
    """Return the local command line that runs a step."""
    return launch_command(["-m", module, "--config", str(config_file)], layout, deployment)


def launch_command(step: Sequence[str], layout: Layout, deployment: Deployment) -> list[str]:
    """Return the local command line that runs `-m module ...` on all machines."""
    match layout.launcher:
        case "process":
            return [sys.executable, *step]
        case "node":
            return _torchrun_command(step, layout.hosts[0], ["--standalone"])
        case "slurm":
            return srun_command(step, layout)
        case "pod":
            return node_command(step, layout, layout.rank)
        case "ray":
            nodes, processes = len(layout.hosts), len(layout.hosts[0].slots)
            options = f"--deployment-type ray --num-nodes {nodes} --num-gpus {processes}".split()
        case "ssh":
            options = [*non_default_options(deployment), "--no-check"]
    return [sys.executable, "-m", "pipeline.launch.cluster", *options, *step]


def node_command(step: Sequence[str], layout: Layout, rank: int) -> list[str]:
    """Return the command line that runs the processes on one of several machines."""
    return _torchrun_command(step, layout.hosts[rank], _rendezvous_options(layout, rank))


def _rendezvous_options(layout: Layout, rank: int | str) -> list[str]:
    """Return torchrun's rendezvous options for machine number `rank`."""
    return [
        *("--nnodes", str(len(layout.hosts)), "--node-rank", str(rank)),
        *("--master-addr", layout.address, "--master-port", str(layout.port)),
    ]


def srun_command(step: Sequence[str], layout: Layout) -> list[str]:
    """Return the command line with which SLURM starts torchrun once per allocated machine.

    srun labels the output by machine, forwards signals, names a failed task, and stops the others.
    """
    rank = "$SLURM_NODEID"
    words = _torchrun_command(step, layout.hosts[0], _rendezvous_options(layout, rank))
    line = " ".join(rank if word == rank else shlex.quote(word) for word in words)
    return [
        *("srun", "--nodes", str(len(layout.hosts)), "--ntasks-per-node", "1", "--label"),
        *("--kill-on-bad-exit=1", "--quit-on-interrupt", "--cpu-bind", "none"),
        *("bash", "-c", f"exec {line}"),
    ]


def host_command(
    command: Sequence[str], host: Host, layout: Layout, deployment: Deployment
) -> list[str]:
    """Return the local command line that runs `command` on a host: by srun, ssh or a local shell.

    The host runs it in the same directory, with this repository's packages on PYTHONPATH.
    """
    shell_command = shell_line(command)
    if layout.launcher == "slurm":
        options = ["--nodes", "1", "--ntasks", "1", "--nodelist", host.name, "--overlap"]
        return ["srun", *options, "--cpu-bind", "none", "sh", "-c", shell_command]
    if is_this_machine(host.name):
        return ["sh", "-c", shell_command]
    return [*shlex.split(deployment.ssh_command), host.name, shell_command]


def shell_line(command: Sequence[str]) -> str:
    """Return the line for another machine's shell that runs a command in this directory."""
    python = shlex.quote(sys.executable)
    return (
        f"cd {shlex.quote(str(Path.cwd()))} || exit {NO_DIRECTORY};"
        f" test -x {python} || exit {NO_PYTHON};"
        f" exec env {shlex.quote(f'PYTHONPATH={ROOT}')} {shlex.join(command)}"
    )


def non_default_options(deployment: Deployment) -> list[str]:
    """Return non-default launcher options as words, except `deployment_type` and `no_check`."""
    words: list[str] = []
    for option in fields(Deployment):
        value = getattr(deployment, option.name)
        if option.name in ("deployment_type", "no_check") or value == option.default:
            continue
        words += [option_name(option.name), *([] if value is True else [str(value)])]
    return words


def step_environment(layout: Layout, deployment: Deployment) -> Mapping[str, str]:
    """Return the command's environment on this machine, with our packages first on PYTHONPATH.

    Python ignores the working directory, where a folder may have the same name as a package.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    if layout.launcher == "process":
        environment.setdefault("OMP_NUM_THREADS", str(cores_per_process(1)))
    shorten_spinning(environment)
    if layout.launcher == "node" and (
        deployment.host_filter or not layout.hosts[0].has_first_slots
    ):
        environment |= visible_devices(layout.hosts[0])
    return environment


def list_devices(host: Host, deployment: Deployment) -> list[str]:
    """Return the GPUs that a host's processes use, as named by `list_gpus`, or [] if none.

    The host must be this machine.
    """
    if deployment.host_filter or not host.has_first_slots:
        return [str(slot) for slot in host.slots] if list_gpus(hidden=True) else []
    return list_gpus()[: len(host.slots)]


def visible_devices(host: Host) -> Mapping[str, str]:
    """Return the environment variable that restricts a process to the host's chosen devices."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(slot) for slot in host.slots)}


def _torchrun_command(step: Sequence[str], host: Host, rendezvous: Sequence[str]) -> list[str]:
    processes = ["--nproc-per-node", str(len(host.slots))]
    return [sys.executable, *TORCHRUN, *rendezvous, *processes, *step]
