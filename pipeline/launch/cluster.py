"""Run a module on several machines, as the `deepspeed` command does, with torchrun on each.

    python -m pipeline.launch.cluster --hostfile hosts -m step1_sft.train --config my.yaml

Without --hostfile, the machines are those of the SLURM allocation in which the command runs.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline.cli.options import parse_command, run_main
from pipeline.launch.child import run_child
from pipeline.launch.commands import (
    REMOTE,
    host_command,
    launch_command,
    node_command,
    step_environment,
    visible_devices,
)
from pipeline.launch.layout import Deployment, Layout, resolve_layout
from pipeline.launch.local import forwarded_variables
from pipeline.launch.preflight import check_machines
from pipeline.launch.remote import RemoteCommand, run_on_all_hosts
from pipeline.system.errors import require


@dataclass(frozen=True, kw_only=True)
class _Options(Deployment):
    deployment_type: Literal["multi_node", "ray"] = "multi_node"
    """The machines of --hostfile or of the SLURM allocation, or the nodes of a Ray cluster."""

    image: str | None = field(init=False, default=None)
    volume: str | None = field(init=False, default=None)
    num_processes: int | None = field(init=False, default=None)


def main(argv: Sequence[str]) -> None:
    """Run a module on all machines; exit with its code."""
    deployment, step = parse_arguments(argv)
    layout = resolve_layout(deployment)
    if layout.launcher == "ray":
        from pipeline.launch.on_ray import run_on_ray

        raise SystemExit(run_on_ray(step, layout))
    if not deployment.no_check:
        check_machines(layout, deployment, Path.cwd())
    if layout.launcher == "ssh":
        raise SystemExit(run_over_ssh(step, layout, deployment))
    command = launch_command(step, layout, deployment)
    code = run_child(command, step_environment(layout, deployment)).code
    raise SystemExit(code if code >= 0 else 128 - code)


def run_over_ssh(step: Sequence[str], layout: Layout, deployment: Deployment) -> int:
    """Run a step on all hosts; return its exit code."""
    variables = forwarded_variables(os.environ)
    remotes: list[RemoteCommand] = []
    for rank, host in enumerate(layout.hosts):
        remote_command = [*REMOTE, *node_command(step, layout, rank)]
        command = host_command(remote_command, host, layout, deployment)
        devices = {} if host.has_first_slots else visible_devices(host)
        remotes.append(RemoteCommand(host.name, command, {**variables, **devices}))
    return run_on_all_hosts(remotes)


def parse_arguments(argv: Sequence[str]) -> tuple[Deployment, list[str]]:
    """Return the launcher's options, and the remaining words: `-m`, the module and its settings.

    `--help` prints and exits with code 0.

    Raises:
        ConfigError: an option is unknown, or there is no module.
    """
    index = list(argv).index("-m") if "-m" in argv else len(argv)
    deployment = parse_command(
        _Options,
        argv[:index],
        usage="python -m pipeline.launch.cluster [OPTION ...] -m MODULE [SETTING ...]",
        about="Run a module on several machines, with torchrun on each.",
    )
    step = list(argv[index:])
    require(
        len(step) > 1 and not step[1].startswith("-"),
        "-m needs a module; end the command with -m MODULE and its options, such as -m"
        " step1_sft.train --config my.yaml",
    )
    return deployment, step


if __name__ == "__main__":
    run_main(main)
