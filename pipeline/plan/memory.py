"""Whether the steps of a plan fit the machine, before anything is loaded."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import yaml

from pipeline.budget.fallbacks import nested
from pipeline.budget.fit import Shortage, shortage
from pipeline.budget.machine import Machine
from pipeline.budget.mesh_sizes import mesh_sizes
from pipeline.budget.models import models_of
from pipeline.budget.step import step_memory
from pipeline.budget.step_seconds import links_of, step_seconds
from pipeline.budget.suggest_fix import Count, refusal, suggest_fix
from pipeline.budget.table import StepMemory
from pipeline.budget.text import line, there
from pipeline.budget.tp_sizes import tp_sizes
from pipeline.config import StepConfig
from pipeline.errors import ConfigError
from pipeline.launch.local import gpu_names, share_of_cores
from pipeline.plan.inputs import model_paths
from pipeline.plan.plan import Plan
from pipeline.plan.stage import Stage


def memory_of(plan: Plan, stage: Stage) -> StepMemory:
    """What a step of the plan takes on its machine."""
    return _count(plan)(plan.configs[stage.name], plan.machine)


def insist_on_memory(plan: Plan) -> None:
    """Refuse a plan of which a step, not finished yet, can't fit its machine.

    Raises:
        ConfigError: it names the step, what it takes, what there is, and the cheapest change.
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
            config = plan.configs[stage.name]
            count, processes = _count(plan), plan.machine.processes
            origins = origins_of(plan.configs)
            sizes = tp_sizes(config, processes=processes, origins=origins)
            mesh = mesh_sizes(config, plan.machine, origins=origins)
            fix = suggest_fix(config, plan.machine, count, tp_sizes=sizes, mesh=mesh)
            yield refusal(stage.title, stage.prefix, short, fix)


def crowded(plan: Plan) -> Iterator[str]:
    """A line where processes on a processor have to share its cores."""
    if _has_too_many_processes(plan):
        cores = share_of_cores(1)
        yield (
            f"{plan.machine.processes} processes share {_cores(cores)}: fewer are as fast, in less"
            " memory"
        )


def _has_too_many_processes(plan: Plan) -> bool:
    return not plan.machine.has_gpu and plan.machine.processes > share_of_cores(1)


def _fewer_processes(plan: Plan, stage: Stage, short: Shortage) -> str:
    """The refusal where fewer processes are what mends it."""
    count, config = _count(plan), plan.configs[stage.name]
    processes = plan.machine.processes
    start = (
        f"{processes} processes are more than this machine can run: {stage.title} {short},"
        f" with {_cores(share_of_cores(1))}"
    )
    fewer = share_of_cores(1)
    while fewer > 1:
        machine = replace(plan.machine, processes=fewer, world=fewer)
        if shortage(count(config, machine), machine) is None:
            break
        fewer //= 2
    option = "--num-processes" if plan.request.num_gpus is None else "--num-gpus"
    return f"{start}; take {option} {max(1, fewer)}"


def _cores(count: int) -> str:
    return f"{count} core{'s' if count != 1 else ''}"


def memory_lines(plan: Plan) -> Iterator[str]:
    """What each step takes, in a line each, under what there is."""
    yield f"memory: {there(plan.machine)}"
    for stage in plan.stages:
        if stage.name not in plan.finished:
            yield f"  {stage.title} takes {line(memory_of(plan, stage), plan.machine)}"


def chosen_settings(plan: Plan) -> Iterator[str]:
    """What `--plan auto` chose, as a file of settings."""
    yield "chosen by --plan auto; as a file for --config:"
    dotted = {f"{at}.{name}": v for at, each in plan.chosen.items() for name, v in each.items()}
    settings = nested(dotted)
    yield from (f"  {each}" for each in yaml.safe_dump(settings, sort_keys=False).splitlines())
    links = links_of(plan.machine, plan.request.plan_for or " ".join(gpu_names()))
    for stage in plan.stages:
        workload = plan.configs[stage.name].workload(plan.machine.world)
        models = models_of(workload, origins_of(plan.configs), has_gpu=plan.machine.has_gpu)
        seconds = step_seconds(models, workload, plan.machine, links)
        yield f"  # {stage.title}, a step of full length, by arithmetic: {seconds}"


def origins_of(configs: Mapping[str, StepConfig]) -> Mapping[str, str]:
    """For each step's output the model it starts from."""
    paths = {str(config.output_dir): dict(model_paths(config)) for config in configs.values()}
    return {out: models["model.path"] for out, models in paths.items() if "model.path" in models}


def _count(plan: Plan) -> Count:
    """What a step takes with any settings, on any machine."""
    origins = origins_of(plan.configs)

    def count(config: StepConfig, machine: Machine) -> StepMemory:
        return step_memory(config, machine=machine, origins=origins)

    return count
