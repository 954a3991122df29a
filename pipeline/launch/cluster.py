"""Runs a module on several machines, as the `deepspeed` command does, with torchrun on each.

    python -m pipeline.launch.cluster --hostfile hosts -m step1_sft.train --config my.yaml

Without --hostfile it uses the SLURM allocation that it runs in.
"""

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from pipeline.cli.help import help_entry, settings_help
from pipeline.cli.options import run_main, say, split_options
from pipeline.launch.child import run_child
from pipeline.launch.commands import (
    REMOTE,
    host_command,
    launch_command,
    node_command,
    step_environment,
    visible_devices,
)
from pipeline.launch.layout import Deployment, Layout, layout, spelled
from pipeline.launch.local import passed_on
from pipeline.launch.preflight import check_machines
from pipeline.launch.remote import RemoteCommand, run_everywhere
from pipeline.settings.build import build_config
from pipeline.settings.fields import list_settings
from pipeline.system.errors import require

NOT_HERE = ("deployment_type", "num_processes", "image", "volume")


def main(argv: Sequence[str]) -> None:
    """Run a module on all machines; exit with its code."""
    deployment, step = parse(argv)
    where = layout(deployment)
    if where.by == "ray":
        from pipeline.launch.on_ray import run_on_ray

        raise SystemExit(run_on_ray(step, where))
    if not deployment.no_check:
        check_machines(where, deployment, Path.cwd())
    if where.by == "ssh":
        raise SystemExit(run_by_ssh(step, where, deployment))
    ending = run_child(launch_command(step, where, deployment), step_environment(where, deployment))
    raise SystemExit(ending.code if ending.code >= 0 else 128 - ending.code)


def run_by_ssh(step: Sequence[str], where: Layout, deployment: Deployment) -> int:
    """Run a step on all hosts; return its exit code."""
    variables = passed_on(os.environ)
    remotes: list[RemoteCommand] = []
    for rank, host in enumerate(where.hosts):
        there = [*REMOTE, *node_command(step, where, rank)]
        command = host_command(there, host, where, deployment)
        devices = {} if host.is_whole else visible_devices(host)
        remotes.append(RemoteCommand(host.name, command, {**variables, **devices}))
    return run_everywhere(remotes)


def parse(argv: Sequence[str]) -> tuple[Deployment, list[str]]:
    """The options, and the module with its settings from `-m` on.

    `--help` prints and exits with code 0.

    Raises:
        ConfigError: an option is unknown, or on the wrong side of `-m MODULE`.
    """
    if "-h" in argv[:1] or "--help" in argv[:1]:
        say(_help())
        raise SystemExit(0)
    at = list(argv).index("-m") if "-m" in argv else len(argv)
    options, step = split_options(argv[:at]), list(argv[at:])
    require(
        len(step) > 1 and not step[1].startswith("-"),
        "-m needs a module; end the command with -m MODULE and its options, such as -m"
        " step1_sft.train --config my.yaml",
    )
    known = {each.name for each in fields(Deployment)} - {*NOT_HERE[1:]}
    for name, _ in options:
        require(
            name in known,
            f"{spelled(name)} is not an option of the launcher; a setting of the step belongs after"
            f" -m {step[1]}",
        )
    for name, _ in split_options(step[2:]):
        require(
            name not in known,
            f"{spelled(name)} is a launcher option; put it before -m {step[1]}",
        )
    return build_config(Deployment, [], [("deployment_type", ["multi_node"]), *options]), step


def _help() -> str:
    own = [each for each in list_settings(Deployment) if each.name not in NOT_HERE]
    return "\n".join(
        [
            "usage: python -m pipeline.launch.cluster [OPTION ...] -m MODULE [SETTING ...]",
            "",
            "Runs a module on several machines, torchrun on each; with --deployment-type ray on",
            "those of a Ray cluster.",
            "",
            *settings_help(own, dashes=True),
            "",
            *help_entry("-m MODULE ...", "What to run, such as step1_sft.train, and its settings."),
        ]
    )


if __name__ == "__main__":
    run_main(main)
