"""Runs a module on several machines, as the `deepspeed` command does, with torchrun on each.

    python -m pipeline.launch.cluster --hostfile hosts -m step1_sft.train --config my.yaml

Without --hostfile it uses the SLURM allocation that it runs in; with --node-rank it is typed on
each machine. What is written by habits of other launchers is answered with its right place.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from pipeline.cli import run_main, say, split_options
from pipeline.errors import ConfigError, require
from pipeline.help import help_entry, settings_help
from pipeline.launch.child import run_child
from pipeline.launch.commands import (
    launch_command,
    node_command,
    step_environment,
    visible_devices,
)
from pipeline.launch.deployment import Deployment
from pipeline.launch.environment import passed_on
from pipeline.launch.layout import Layout, layout
from pipeline.launch.preflight import insist, look
from pipeline.launch.reach import host_command
from pipeline.launch.remote import Errand, run_everywhere
from pipeline.settings.build import build_config
from pipeline.settings.describe import did_you_mean, list_settings
from pipeline.settings.plain import Option

OF_TORCHRUN = {
    "nnodes": "--num-nodes, and --min-nodes for a range",
    "nproc_per_node": "--num-gpus",
    "rdzv_endpoint": "--master-addr and --master-port",
    "rdzv_backend": "--min-nodes",
}
OF_DEEPSPEED = ("deepspeed", "deepspeed_config", "deepscale", "deepscale_config")
NODE = (sys.executable, "-m", "pipeline.launch.node")
FILES = ("--config", "--zero-config")


def main(argv: Sequence[str]) -> None:
    """Run the module of a command line on all machines; exit with its code."""
    deployment, step = parse(argv)
    where = layout(deployment)
    if not deployment.no_check:
        where = insist(look(where, deployment, Path.cwd()))
    if where.by == "ssh":
        raise SystemExit(run_by_ssh(step, where, deployment))
    ending = run_child(launch_command(step, where, deployment), step_environment(where, deployment))
    raise SystemExit(ending.code if ending.code >= 0 else 128 - ending.code)


def run_by_ssh(step: Sequence[str], where: Layout, deployment: Deployment) -> int:
    """Run a step on all hosts; its exit code."""
    variables = passed_on(os.environ, deployment.env_file)
    errands = [
        Errand(
            host.name,
            host_command(
                [*NODE, *node_command(step, where, rank, deployment)], host, where, deployment
            ),
            variables if host.is_whole else {**variables, **visible_devices(host)},
        )
        for rank, host in enumerate(where.hosts)
    ]
    return run_everywhere(errands, fewest=where.fewest)


def parse(argv: Sequence[str]) -> tuple[Deployment, list[str]]:
    """The options, and from `-m` on the module with its own.

    `--help` prints and exits with code 0.

    Raises:
        ConfigError: a word stands where it can't be used; the sentence says where it belongs.
    """
    if "-h" in argv[:1] or "--help" in argv[:1]:
        say(_help())
        raise SystemExit(0)
    at = list(argv).index("-m") if "-m" in argv else len(argv)
    options, step = split_options(argv[:at]), list(argv[at:])
    known = {each.name for each in fields(Deployment)} - {"deployment_type", "num_processes"}
    for index, (name, _) in enumerate(options):
        _check_own(name, known, step)
        require(
            name not in [earlier for earlier, _ in options[:index]],
            f"{_spelled(name)} is given twice; the launcher takes it once",
        )
    require(
        len(step) > 1 and not step[1].startswith("-"),
        "-m names no module; end the command with -m MODULE and its options, such as"
        " -m step1_sft.train --config my.yaml",
    )
    _check_steps(step, known)
    many: list[Option] = [("deployment_type", ["multi_node"])]
    return build_config(Deployment, [], many + options), step


def _check_own(name: str, known: set[str], step: Sequence[str]) -> None:
    """Raise for a name before -m that is not the launcher's, with its right place."""
    if name in known:
        return
    spelled = _spelled(name)
    require(
        name != "local_rank",
        "--local-rank is given to each process by torchrun, in LOCAL_RANK; leave it out",
    )
    require(name not in OF_TORCHRUN, f"{spelled} is torchrun's; here {OF_TORCHRUN.get(name)}")
    module = step[1] if len(step) > 1 else "MODULE"
    require(
        name not in OF_DEEPSPEED,
        f"{spelled}: the DeepSpeed file is a setting of the step; put it after -m {module}, as"
        " --zero-config FILE",
    )
    close = did_you_mean([*list_settings(Deployment)], name)
    meant = f"did you mean {_spelled(close[0])}? A" if close else "a"
    raise ConfigError(
        f"{spelled} is not an option of the launcher; {meant} setting of the step belongs after"
        f" -m {module}"
    )


def _check_steps(step: Sequence[str], known: set[str]) -> None:
    """Raise for a word after -m that the step would refuse on every machine."""
    for name, _ in split_options(step[2:]):
        require(
            name not in known,
            f"{_spelled(name)} is the launcher's; put it before -m {step[1]}",
        )
        require(
            name not in OF_DEEPSPEED,
            f"{_spelled(name)}: the DeepSpeed file is the step's --zero-config FILE",
        )
    for name, words in split_options(step[2:]):
        if _spelled(name) in FILES:
            require(bool(words), f"{_spelled(name)} needs a file")
            for word in words:
                require(Path(word).is_file(), f"{_spelled(name)} {word}: no such file")


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _help() -> str:
    own = [
        each
        for each in list_settings(Deployment)
        if each.name not in ("deployment_type", "num_processes")
    ]
    return "\n".join(
        [
            "usage: python -m pipeline.launch.cluster [OPTION ...] -m MODULE [SETTING ...]",
            "",
            "Runs a module on several machines, torchrun on each.",
            "",
            *settings_help(own, dashes=True),
            "",
            *help_entry("-m MODULE ...", "What to run, such as step1_sft.train, and its settings."),
        ]
    )


if __name__ == "__main__":
    run_main(main)
