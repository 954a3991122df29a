"""`--plan auto`: the first settings in a list of rungs, the fastest first, that fit.

Settings that the user gave stay.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pipeline.budget.fit import describe_machine, shortage
from pipeline.budget.fixes import (
    ENOUGH_TOKENS,
    MOST_TOKENS,
    MeshSizes,
    Settings,
    changed,
    mesh_sizes,
    micro_batches,
    rungs,
)
from pipeline.budget.machine import Machine
from pipeline.budget.memory import StepMemory, step_memory
from pipeline.config import StepConfig
from pipeline.errors import ConfigError, ModelError, require
from pipeline.plan.memory import origins_of
from pipeline.plan.request import CommandLine
from pipeline.plan.resolve import step_config, step_configs, user_settings
from pipeline.plan.stage import Stage

MARGIN = 0.9
"""Share of the memory that is planned with."""


def choose(
    command_line: CommandLine, stages: Sequence[Stage], machine: Machine
) -> Mapping[str, Settings]:
    """Settings by the prefix of their stage, for the requested steps.

    Raises:
        ModelError: the size of a model is not known.
        ConfigError: the memory of the machines is not known.
    """
    require(
        machine.is_known,
        f"--plan auto can't choose, for {describe_machine(machine)}; name the machine with"
        " --plan-for, as --plan-for 8xA100-80GB, and run with the file of settings that this"
        " prints",
    )
    origins = origins_of(step_configs(command_line, stages, world=machine.world))
    chosen: dict[str, Settings] = {}
    for stage in stages:
        if stage.number in command_line.request.step:
            base = step_config(stage, command_line, stages, world=machine.world)
            given = user_settings(stage, command_line, stages, world=machine.world)
            memory = step_memory(base, machine=machine, origins=origins)
            if memory.unknown:
                raise ModelError(f"--plan auto can't choose for {stage.title}: {memory.unknown[0]}")
            chosen[stage.prefix] = _first_that_fits(base, given, machine, origins)
    return chosen


def _first_that_fits(
    base: StepConfig, given: frozenset[str], machine: Machine, origins: Mapping[str, str]
) -> Settings:
    """The settings of the first rung that fits; none where no rung does."""
    mesh = mesh_sizes(base, machine, origins)
    tight = _with_margin(machine)
    for settings in _candidates(base, machine, mesh):
        free = {name: value for name, value in settings.items() if name not in given}
        try:
            config = changed(base, free)
            config.parallel.check(machine.world)
            memory = step_memory(config, machine=machine, origins=origins)
        except (ConfigError, ModelError):  # it contradicts a given setting, or the family
            continue
        if shortage(memory, tight) is None:
            responses = _responses_at_once(config, memory, tight)
            return {**free, **{n: v for n, v in responses.items() if n not in given}}
    return {}


def _candidates(base: StepConfig, machine: Machine, mesh: MeshSizes) -> Iterator[Settings]:
    """Every rung with micro-batches that are fast enough, then with smaller ones."""
    length = base.workload(machine.world).length
    enough = -(-ENOUGH_TOKENS // length)
    for is_large in (True, False):
        for rung in rungs(base, machine, mesh):
            data = machine.world // (rung.get("parallel.tp", 1) * rung.get("parallel.pp", 1))
            most = max(1, min(-(-base.batch_size // max(1, data)), MOST_TOKENS // length))
            for size in micro_batches(most):
                if (size >= min(enough, most)) == is_large:
                    for generation in _generation_variants(base, machine, mesh):
                        yield {**rung, "micro_batch_size": size, **generation}


def _generation_variants(base: StepConfig, machine: Machine, mesh: MeshSizes) -> Iterator[Settings]:
    """Ways to generate, the fastest first."""
    if not base.workload(machine.world).generates_first:
        yield {}
        return
    for offloads in (False, True) if machine.has_gpu else (False,):
        for size in (1, *mesh.inference_tp):
            yield {"inference_tp_size": size, "offload_in_generation": offloads}


def _responses_at_once(config: StepConfig, memory: StepMemory, machine: Machine) -> Settings:
    """The number of responses that the key-value cache has room for."""
    workload = config.workload(machine.world)
    generation = workload.generation
    if generation is None or not workload.generates_first:
        return {}
    phase = next(phase for phase in memory.phases if phase.name == "generate")
    room = machine.gpu_bytes or (machine.host_bytes or 0) // machine.processes
    one, every = phase.least().peak("device"), phase.peak("device")
    each = (every - one) / max(1, generation.slots - 1)
    count = 1 + int((room - one) / each) if each else generation.slots
    return {"generation_batch_size": max(1, min(count, generation.most_at_once))}


def _with_margin(machine: Machine) -> Machine:
    gpu, host = machine.gpu_bytes, machine.host_bytes
    return replace(
        machine,
        gpu_bytes=None if gpu is None else int(MARGIN * gpu),
        host_bytes=None if host is None else int(MARGIN * host),
    )
