"""Whether a step fits a machine, and the cheapest settings with which it does.

Options that save memory are ordered as DeepSpeed orders them: smaller micro-batches,
recomputation, stage 2, an offloaded optimizer, stage 3, offloaded weights; then tensor and pipeline
parallelism, and adapters. A refusal and `--plan auto` search the same list.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from pipeline.budget.machine import Machine, describe_machine, in_words, this_machine
from pipeline.budget.memory import Phase, StepMemory, line, step_memory
from pipeline.budget.models import read_models
from pipeline.cli.options import say
from pipeline.config import LoraConfig, StepConfig, TrainedModelConfig
from pipeline.launch.local import PLANNED, list_gpus
from pipeline.parallel import launched
from pipeline.settings.fields import nested
from pipeline.system.errors import ConfigError, ModelError

ConfigT = TypeVar("ConfigT")

Settings = Mapping[str, Any]
"""Values by dotted name, as in a settings file: {"model.zero_stage": 2}."""

Count = Callable[[StepConfig], StepMemory]
"""Function that computes the memory of a step with given settings on a fixed machine."""

CHECKPOINTING: Settings = {"gradient_checkpointing": True}
OFFLOADED: Settings = {"zero.offload.optimizer": "cpu", "zero.offload.gradients": "cpu"}
WEIGHTS_OFFLOADED: Settings = {"zero_stage": 3, **OFFLOADED, "zero.offload.params": "cpu"}

ENOUGH_TOKENS = 2048
"""Tokens per micro-batch below which `--plan auto` prefers recomputation or offload."""

MOST_TOKENS = 16384
"""Tokens per micro-batch above which a larger one is not faster."""

MARGIN = 0.9
"""Fraction of the memory that `--plan auto` fills."""


@dataclass(frozen=True)
class Shortage:
    """A phase that needs more memory than is available."""

    phase: Phase
    where: str
    """The memory's name in messages, such as "each GPU"."""

    needed: int
    available: int

    def __str__(self) -> str:
        """The needed and available memory, phrased to follow the name of a step."""
        needed, available = in_words(self.needed, self.available)
        return f"takes {needed} on {self.where} to {self.phase.name}, with {available} available"


def shortage(memory: StepMemory, machine: Machine) -> Shortage | None:
    """The phase that lacks the most memory; None if no phase is known to lack any."""
    lacks: list[Shortage] = []
    for phase in memory.phases:
        least = phase.least()
        device, host = least.peak("device"), least.peak("host")
        if machine.gpu_bytes is not None and device > machine.gpu_bytes:
            lacks.append(Shortage(phase, "each GPU", device, machine.gpu_bytes))
        on_host = machine.processes * (host if machine.has_gpu else device + host)
        if machine.host_bytes is not None and on_host > machine.host_bytes:
            lacks.append(Shortage(phase, "each machine", on_host, machine.host_bytes))
    return max(lacks, key=lambda short: short.needed - short.available, default=None)


def check_memory(config: StepConfig) -> None:
    """Print the memory that a step needs, on the first process, and refuse it if it can't fit.

    `train.py` checks all steps itself.

    Raises:
        ConfigError: the step doesn't fit; the message has the numbers and the cheapest change.
    """
    if launched.rank() != 0 or PLANNED in os.environ:
        return
    processes = launched.local_world_size()
    gpus = list_gpus()[:processes]
    machine = this_machine(processes=processes, world=launched.world_size(), gpus=gpus)
    memory = step_memory(config, machine=machine)
    if (sentence := refusal("this step", "", config, machine, {}, memory)) is not None:
        raise ConfigError(sentence)
    say(f"memory: {describe_machine(machine)}; this step takes {line(memory, machine)}")


def refusal(
    step: str,
    section: str,
    config: StepConfig,
    machine: Machine,
    origins: Mapping[str, str],
    memory: StepMemory,
) -> str | None:
    """The error message for a step that can't fit; None if it fits.

    Args:
        step: beginning of the sentence, such as "step 1".
        section: prefix of the settings on the command line; empty for a step's own command.
        config: settings of the step.
        machine: the machine it will run on.
        origins: for a directory that an earlier step has yet to write, the model it starts from.
        memory: the memory of the step on that machine.
    """
    short = shortage(memory, machine)
    if short is None:
        return None
    count = partial(step_memory, machine=machine, origins=origins)
    fix = suggest_fix(config, machine, count, origins)
    if fix is None:
        return (
            f"{step} {short}; no memory-saving setting makes it fit: use a smaller model, shorter"
            " sequences, or a machine with more memory, more GPUs or fewer processes"
        )
    prefix = f"--{section}." if section else "--"
    options = (f"{prefix}{name} {str(value).lower()}" for name, value in fix.items())
    return f"{step} {short}; it fits with {' '.join(options)}"


def suggest_fix(
    config: StepConfig, machine: Machine, count: Count, origins: Mapping[str, str] | None = None
) -> Settings | None:
    """The cheapest change with which a step fits; None if there is none."""
    options = [{"micro_batch_size": 1}, *savings(config, machine, origins or {})]
    spare = [option for option in options if "cpu" not in option.values()]
    adapters = of_models(config, {"lora.rank": 16})
    quantized = {**adapters, **of_models(config, {"quantize": "nf4"})}
    lists = (options, spare, [*options, adapters], [*spare, adapters, quantized])
    found = (first_that_fits(config, machine, count, each) for each in lists)
    return next((settings for settings in found if settings is not None), None)


def choose_settings(
    config: StepConfig, machine: Machine, origins: Mapping[str, str], given: frozenset[str]
) -> Settings:
    """Choose the fastest settings that leave a tenth of the memory free; empty if there are none.

    Args:
        config: settings of the step.
        machine: the machine it will run on.
        origins: for a directory that an earlier step has yet to write, the model it starts from.
        given: dotted names of settings that the user gave, which are kept.
    """
    tight = replace(
        machine,
        gpu_bytes=machine.gpu_bytes and int(MARGIN * machine.gpu_bytes),
        host_bytes=machine.host_bytes and int(MARGIN * machine.host_bytes),
    )
    work = config.workload(machine.world)
    most = max(1, min(-(-config.batch_size // work.data_processes), MOST_TOKENS // work.length))
    fastest = {
        **of_models(config, {"zero_stage": 2 if machine.world > 1 else 0}),
        "micro_batch_size": most,
    }
    enough = max(1, min(most, ENOUGH_TOKENS // work.length))
    options = [
        {"micro_batch_size": enough},
        *savings(config, machine, origins),
        {"micro_batch_size": 1},
    ]

    def free(settings: Settings) -> Settings:
        return {name: value for name, value in settings.items() if name not in given}

    count = partial(step_memory, machine=machine, origins=origins)
    try:
        start = changed(config, free(fastest))
        start.parallel.check(machine.world)
    except ConfigError:  # contradicts a given setting
        fastest, start = {}, config
    for offloads in (False, True):  # shard before offloading
        allowed = [o for o in map(free, options) if offloads or "cpu" not in o.values()]
        found = first_that_fits(start, tight, count, [{}, *allowed])
        if found is not None:
            chosen = {**free(fastest), **found}
            responses = _responses_at_once(changed(config, chosen), tight, count)
            return {**chosen, **free(responses)}
    return {}


def _responses_at_once(config: StepConfig, machine: Machine, count: Count) -> Settings:
    """The largest `generation_batch_size` that fits, as a setting; empty for steps without it."""
    generation = config.workload(machine.world).generation
    if generation is None or generation.phase != "each iteration":
        return {}
    phase = next(phase for phase in count(config).phases if phase.name == "generate")
    room = machine.gpu_bytes or (machine.host_bytes or 0) // machine.processes
    one, every = phase.least().peak("device"), phase.peak("device")
    each = (every - one) / max(1, generation.slots - 1)
    slots = 1 + int((room - one) / each) if each else generation.slots
    return {"generation_batch_size": max(1, min(slots, generation.most_at_once))}


def savings(
    config: StepConfig, machine: Machine, origins: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Settings that save memory on this machine, the cheapest first."""
    many, stage_2 = machine.world > 1, of_models(config, {"zero_stage": 2})
    tp, pp = _divisors(config, machine, origins)
    options: list[tuple[bool, Settings]] = [
        (True, {"reuse_forward": False}),
        (True, of_models(config, CHECKPOINTING)),
        (True, {"replica": "release"}),
        (many, stage_2),
        (config.parallel.replicas > 1, {"parallel.replicas": 1}),
        (machine.has_gpu, of_models(config, OFFLOADED)),
        (many, of_models(config, {"zero_stage": 3})),
        *((size <= 8, {"inference_tp_size": size}) for size in tp),
        (machine.has_gpu, of_models(config, WEIGHTS_OFFLOADED)),
        (machine.has_gpu, {"offload_in_generation": True}),
        *((size > config.parallel.tp, {"parallel.tp": size}) for size in tp),
        *((size > config.parallel.pp, {"parallel.pp": size, **stage_2}) for size in pp),
    ]
    for applies, settings in options:
        if applies and all(hasattr(config, name.partition(".")[0]) for name in settings):
            yield dict(settings)


def _divisors(
    config: StepConfig, machine: Machine, origins: Mapping[str, str]
) -> tuple[list[int], list[int]]:
    """Sizes above 1 of `parallel.tp` and `parallel.pp` that processes and models allow.

    Families that can't be divided are found when the memory of a candidate is computed.
    """
    every, _ = read_models(config.workload(machine.world), origins, has_gpu=machine.has_gpu)
    models = [model for model in every if model.trained is not None]
    if machine.world == 1 or not models:
        return [], []
    heads = math.gcd(*(model.shape.key_heads for model in models))
    blocks = min(model.shape.layers for model in models)
    sizes = range(2, machine.world + 1)
    tp = [size for size in sizes if machine.processes % size == 0 and heads % size == 0]
    return tp, [size for size in sizes if machine.world % size == 0 and size <= blocks]


def first_that_fits(
    config: StepConfig, machine: Machine, count: Count, options: Sequence[Settings]
) -> Settings | None:
    """Merge the shortest prefix of the options with which a step fits; None if there is none.

    Settings that turn out not to be needed are left out, the most expensive first; then the
    micro-batch is made as large as possible.
    """

    def fits(settings: Settings) -> bool:
        try:
            other = changed(config, settings)
            other.parallel.check(machine.world)
            return shortage(count(other), machine) is None
        except (ConfigError, ModelError):  # contradict other settings or the model family
            return False

    together: dict[str, Any] = {}
    for option in options:
        if not option or _is_change(config, option):
            together |= option
            if fits(together):
                break
    else:
        return None
    for name in reversed(list(together)):
        fewer = {other: value for other, value in together.items() if other != name}
        if fits(fewer):
            together = fewer
    least = together.get("micro_batch_size", config.micro_batch_size)
    sizes = (2**power for power in reversed(range((config.micro_batch_size - 1).bit_length())))
    for size in sizes:
        if size > least and fits({**together, "micro_batch_size": size}):
            return {**together, "micro_batch_size": size}
    return together


def _is_change(config: StepConfig, settings: Settings) -> bool:
    """Whether the settings change the step in a way that can save memory."""
    for role, model in trained_models(config).items():
        stage = settings.get(f"{role}.zero_stage", model.zero_stage)
        if stage < model.zero_stage and "parallel.pp" not in settings:
            return False
        if f"{role}.lora.rank" in settings and model.lora and f"{role}.quantize" not in settings:
            return False
    try:
        return changed(config, settings) != config
    except ConfigError:
        return False


def trained_models(config: StepConfig) -> dict[str, TrainedModelConfig]:
    """The trained models of a step, by role."""
    uses = config.workload(1).models
    return {use.role: use.settings for use in uses if isinstance(use.settings, TrainedModelConfig)}


def of_models(config: StepConfig, settings: Settings) -> dict[str, Any]:
    """These settings for every trained model of the step."""
    return {
        f"{role}.{n}": value for role in trained_models(config) for n, value in settings.items()
    }


def changed(config: ConfigT, settings: Settings) -> ConfigT:
    """A copy of the settings with other values; null sections are created as needed."""
    values = nested(settings)
    for name, value in values.items():
        section = getattr(config, name) or (LoraConfig() if name == "lora" else None)
        if isinstance(value, dict) and not isinstance(section, dict):
            values[name] = changed(section, value)
    return replace(config, **values)  # pyrefly: ignore[bad-specialization]
