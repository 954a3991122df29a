"""Whether the steps of a plan fit the machine, before anything is loaded."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import yaml

from pipeline.budget.fit import Shortage, describe_machine, line, shortage
from pipeline.budget.fixes import Count, mesh_sizes, nested, refusal, suggest_fix
from pipeline.budget.machine import Machine
from pipeline.budget.memory import StepMemory, moment_bytes, step_memory
from pipeline.budget.models import models_of
from pipeline.config import StepConfig
from pipeline.errors import ConfigError
from pipeline.launch.local import share_of_cores
from pipeline.plan.inputs import model_paths
from pipeline.plan.plan import Plan
from pipeline.plan.stage import Stage


def memory_of(plan: Plan, stage: Stage) -> StepMemory:
    """The memory of a step of the plan on its machine."""
    return _count(plan)(plan.configs[stage.name], plan.machine)


def insist_on_memory(plan: Plan) -> None:
    """Refuse a plan with an unfinished step that can't fit its machine.

    Raises:
        ConfigError: names the step, its need, the supply, and the cheapest change.
    """
    for sentence in refusals(plan):
        raise ConfigError(sentence)


def refusals(plan: Plan) -> Iterator[str]:
    """A sentence for each step that can't fit."""
    for stage in plan.stages:
        if stage.name in plan.finished:
            continue
        short = shortage(memory_of(plan, stage), plan.machine)
        if short is not None and _has_too_many_processes(plan):
            yield _fewer_processes(plan, stage, short)
        elif short is not None:
            config, origins = plan.configs[stage.name], origins_of(plan.configs)
            mesh = mesh_sizes(config, plan.machine, origins)
            fix = suggest_fix(config, plan.machine, _count(plan), mesh)
            yield refusal(stage.title, stage.prefix, short, fix)


def crowded(plan: Plan) -> Iterator[str]:
    """A line where the processes outnumber the cores."""
    if _has_too_many_processes(plan):
        yield (
            f"{plan.machine.processes} processes share {_cores(share_of_cores(1))}: fewer are as"
            " fast, in less memory"
        )


def _has_too_many_processes(plan: Plan) -> bool:
    return not plan.machine.has_gpu and plan.machine.processes > share_of_cores(1)


def _fewer_processes(plan: Plan, stage: Stage, short: Shortage) -> str:
    """The refusal where fewer processes are the fix."""
    count, config = _count(plan), plan.configs[stage.name]
    fewer = share_of_cores(1)
    while fewer > 1:
        machine = replace(plan.machine, processes=fewer, world=fewer)
        if shortage(count(config, machine), machine) is None:
            break
        fewer //= 2
    option = "--num-processes" if plan.request.num_gpus is None else "--num-gpus"
    return (
        f"{plan.machine.processes} processes are more than this machine can run: {stage.title}"
        f" {short}, with {_cores(share_of_cores(1))}; take {option} {max(1, fewer)}"
    )


def _cores(count: int) -> str:
    return f"{count} core{'s' if count != 1 else ''}"


def memory_lines(plan: Plan) -> Iterator[str]:
    """The machine's memory, and a line for each step."""
    yield f"memory: {describe_machine(plan.machine)}"
    for stage in plan.stages:
        if stage.name not in plan.finished:
            yield f"  {stage.title} takes {line(memory_of(plan, stage), plan.machine)}"


def chosen_settings(plan: Plan) -> Iterator[str]:
    """The choice of `--plan auto` as a file of settings."""
    yield "chosen by --plan auto; as a file for --config:"
    dotted = {f"{at}.{name}": v for at, each in plan.chosen.items() for name, v in each.items()}
    settings = nested(dotted)
    yield from (f"  {each}" for each in yaml.safe_dump(settings, sort_keys=False).splitlines())


def origins_of(configs: Mapping[str, StepConfig]) -> Mapping[str, str]:
    """For each step's output the model it starts from."""
    paths = {str(config.output_dir): dict(model_paths(config)) for config in configs.values()}
    return {out: models["model.path"] for out, models in paths.items() if "model.path" in models}


def _count(plan: Plan) -> Count:
    """The memory of a step with any settings, on any machine."""
    origins = origins_of(plan.configs)

    def count(config: StepConfig, machine: Machine) -> StepMemory:
        return step_memory(config, machine=machine, origins=origins)

    return count


def checkpoint_bytes(
    config: StepConfig, machine: Machine, origins: Mapping[str, str]
) -> int | None:
    """Bytes of a checkpoint: fp32 weights, moments and copies; None where a model is not known."""
    models = models_of(config.workload(machine.world), origins, has_gpu=machine.has_gpu)
    total = 0.0
    for model in models:
        if model.trained is None:
            continue
        if model.module is None:
            return None
        each = 4 * (1 + model.use.keeps_average + model.use.keeps_best)
        numbers = model.shape.block_trained + model.shape.root_trained
        total += numbers * (each + moment_bytes(model.trained.optim))
    return int(total)


def saving(plan: Plan, stage: Stage) -> Iterator[str]:
    """Sentences on the checkpoints of a step; none where their size is not known."""
    config = plan.configs[stage.name]
    total = checkpoint_bytes(config, plan.machine, origins_of(plan.configs))
    if total is None:
        return
    every = config.save_interval
    when = "when a signal ends the run"
    if every is not None:
        when = f"every {config.save_every}" + (" steps" if every.steps is not None else "")
    yield f"{in_bytes(total)}, {when}"


def in_bytes(count: float) -> str:
    """`512 kB`, `38.2 MB`, `1.05 GB`, in powers of ten."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count / 1e3:.3g} kB"
