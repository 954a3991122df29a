"""How a command comes to run on another machine: through ssh, or srun inside an allocation."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.launch.commands import ROOT
from pipeline.launch.deployment import Deployment
from pipeline.launch.hosts import Host, is_this_machine
from pipeline.launch.layout import Layout

NO_DIRECTORY, NO_PYTHON = 120, 121
"""Exit codes where a machine lacks what the command needs."""


def host_command(
    command: Sequence[str], host: Host, where: Layout, deployment: Deployment
) -> list[str]:
    """The command line on this machine that runs another one on a host.

    There it runs in the directory of the same name, and finds this repository's packages.
    """
    line = shell_line(command, directory=Path.cwd(), python_path=ROOT)
    if where.by == "slurm":
        one = ["--nodes", "1", "--ntasks", "1", "--nodelist", host.name, "--overlap"]
        return ["srun", *one, "--cpu-bind", "none", "sh", "-c", line]
    if is_this_machine(host.name):
        return ["sh", "-c", line]
    return [*shlex.split(deployment.ssh_command), host.name, line]


def shell_line(command: Sequence[str], *, directory: Path, python_path: Path) -> str:
    """The line for another machine's shell that runs a command in a directory."""
    python = shlex.quote(sys.executable)
    return (
        f"cd {shlex.quote(str(directory))} || exit {NO_DIRECTORY};"
        f" test -x {python} || exit {NO_PYTHON};"
        f" exec env {shlex.quote(f'PYTHONPATH={python_path}')} {shlex.join(command)}"
    )
