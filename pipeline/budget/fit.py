"""Check whether a step fits a machine, and find the cheapest settings with which it fits.

Options that save memory are ordered as DeepSpeed orders them: smaller micro-batches,
gradient checkpointing, stage 2, an offloaded optimizer, stage 3, offloaded weights; then tensor and
pipeline parallelism, and adapters. A refusal and `--plan auto` search the same list.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from pipeline.budget.machine import Machine, describe_machine, detect_machine, format_bytes
from pipeline.budget.memory import Phase, StepMemory, memory_summary, step_memory
from pipeline.budget.models import build_models
from pipeline.cli.options import print_output
from pipeline.config import LoraConfig, StepConfig, TrainedModelConfig
from pipeline.launch.local import PLANNED, list_gpus
from pipeline.parallel import launched
from pipeline.settings.fields import unflatten
from pipeline.system.errors import ConfigError, ModelError

ConfigT = TypeVar("ConfigT")

Settings = Mapping[str, Any]
"""Values by dotted name, as in a settings file: {"model.zero_stage": 2}."""

MemoryEstimator = Callable[[StepConfig], StepMemory]
"""Function that computes the memory of a step with given settings on a fixed machine."""

CHECKPOINTING: Settings = {"gradient_checkpointing": True}
OFFLOADED: Settings = {"zero.offload.optimizer": "cpu", "zero.offload.gradients": "cpu"}
WEIGHTS_OFFLOADED: Settings = {"zero_stage": 3, **OFFLOADED, "zero.offload.params": "cpu"}

MIN_EFFICIENT_TOKENS = 2048
"""Tokens per micro-batch below which `--plan auto` prefers gradient checkpointing or offload."""

MAX_EFFICIENT_TOKENS = 16384
"""Tokens per micro-batch above which a larger one is not faster."""

TARGET_FRACTION = 0.9
"""Fraction of the memory that `--plan auto` fills."""


@dataclass(frozen=True)
class Shortage:
    """A phase that needs more memory than is available."""

    phase: Phase
    location: str
    """The memory's name in messages, such as "each GPU"."""

    needed: int
    available: int

    def __str__(self) -> str:
        """Describe the needed and available memory, as a clause that follows a step's name."""
        need, free = format_bytes(self.needed, self.available)
        return f"needs {need} on {self.location} to {self.phase.name}, but only {free} is available"


def find_shortage(memory: StepMemory, machine: Machine) -> Shortage | None:
    """Return the phase that lacks the most memory, or None if no phase is known to lack any."""
    shortages: list[Shortage] = []
    for phase in memory.phases:
        minimum = phase.at_minimum()
        device = minimum.peak("device")
        if machine.gpu_bytes is not None and device > machine.gpu_bytes:
            shortages.append(Shortage(phase, "each GPU", device, machine.gpu_bytes))
        host_total = _machine_bytes(phase, memory, machine)
        if machine.host_bytes is not None and host_total > machine.host_bytes:
            shortages.append(Shortage(phase, "each machine", host_total, machine.host_bytes))
    return max(shortages, key=lambda item: item.needed - item.available, default=None)


def _machine_bytes(phase: Phase, memory: StepMemory, machine: Machine) -> int:
    """Return the minimum host memory that a machine's processes need during `phase`, in bytes.

    Processes that only generate run at the same time as the other processes' largest phase.
    """

    def process_bytes(phase: Phase) -> int:
        host = phase.at_minimum().peak("host")
        return host if machine.has_gpu else phase.at_minimum().peak("device") + host

    is_rollout = phase.name == "rollouts"
    count = memory.generating if is_rollout else machine.world - memory.generating
    count = min(count, machine.processes)
    others = (other for other in memory.phases if (other.name == "rollouts") != is_rollout)
    other_bytes = max(map(process_bytes, others), default=0)
    return count * process_bytes(phase) + (machine.processes - count) * other_bytes


def check_memory(config: StepConfig) -> None:
    """On the first process, print the memory that a step needs, or raise if it can't fit.

    Do nothing if `train.py` has already checked the step.

    Raises:
        ConfigError: the step doesn't fit; the message gives the numbers and the cheapest change.
    """
    if launched.rank() != 0 or PLANNED in os.environ:
        return
    processes = launched.local_world_size()
    gpus = list_gpus()[:processes]
    machine = detect_machine(processes=processes, world=launched.world_size(), gpus=gpus)
    memory = step_memory(config, machine=machine)
    if (message := shortage_message("this step", "", config, machine, {}, memory)) is not None:
        raise ConfigError(message)
    summary = memory_summary(memory, machine)
    print_output(f"memory: {describe_machine(machine)}; this step takes {summary}")


def shortage_message(
    step: str,
    section: str,
    config: StepConfig,
    machine: Machine,
    origins: Mapping[str, str],
    memory: StepMemory,
) -> str | None:
    """Return the error message for a step that can't fit, or None if it fits.

    The sentence begins with `step`, such as "step 1". `section` is the prefix of the settings on
    the command line, empty for a step's own command. See `step_memory` for `origins`.
    """
    shortage = find_shortage(memory, machine)
    if shortage is None:
        return None
    estimate = partial(step_memory, machine=machine, origins=origins)
    fix = suggest_fix(config, machine, estimate, origins)
    if fix is None:
        return (
            f"{step} {shortage}; no memory-saving setting makes it fit: use a smaller model,"
            " shorter sequences, fewer processes per machine, or more memory or GPUs"
        )
    prefix = f"--{section}." if section else "--"
    options = (f"{prefix}{name} {str(value).lower()}" for name, value in fix.items())
    return f"{step} {shortage}; it fits with {' '.join(options)}"


def suggest_fix(
    config: StepConfig,
    machine: Machine,
    estimate: MemoryEstimator,
    origins: Mapping[str, str] | None = None,
) -> Settings | None:
    """Return the cheapest change that makes a step fit, or None if there is none."""
    options = [{"micro_batch_size": 1}, *list_savings(config, machine, origins or {})]
    on_device = [option for option in options if "cpu" not in option.values()]
    adapters = for_models(config, {"lora.rank": 16})
    quantized = {**adapters, **for_models(config, {"quantize": "nf4"})}
    option_lists = (options, on_device, [*options, adapters], [*on_device, adapters, quantized])
    fixes = (merge_until_fit(config, machine, estimate, candidates) for candidates in option_lists)
    return next((fix for fix in fixes if fix is not None), None)


def choose_settings(
    config: StepConfig, machine: Machine, origins: Mapping[str, str], given: frozenset[str]
) -> Settings:
    """Return the fastest settings that leave a tenth of the memory free, or {} if none do.

    See `step_memory` for `origins`. The settings whose dotted names are in `given` are kept.
    """
    target = replace(
        machine,
        gpu_bytes=machine.gpu_bytes and int(TARGET_FRACTION * machine.gpu_bytes),
        host_bytes=machine.host_bytes and int(TARGET_FRACTION * machine.host_bytes),
    )
    work = config.workload(machine.world)
    local_batch = -(-config.batch_size // work.data_processes)
    max_size = max(1, min(local_batch, MAX_EFFICIENT_TOKENS // work.length))
    fastest = {
        **for_models(config, {"zero_stage": 2 if machine.world > 1 else 0}),
        "micro_batch_size": max_size,
    }
    efficient_size = max(1, min(max_size, MIN_EFFICIENT_TOKENS // work.length))
    options = [
        {"micro_batch_size": efficient_size},
        *list_savings(config, machine, origins),
        {"micro_batch_size": 1},
    ]

    def without_given(settings: Settings) -> Settings:
        return {name: value for name, value in settings.items() if name not in given}

    estimate = partial(step_memory, machine=machine, origins=origins)
    try:
        start = replace_settings(config, without_given(fastest))
        start.check_processes(machine.world)
    except ConfigError:  # contradicts a given setting
        fastest, start = {}, config
    for offloads in (False, True):  # shard before offloading
        allowed = [o for o in map(without_given, options) if offloads or "cpu" not in o.values()]
        savings = merge_until_fit(start, target, estimate, [{}, *allowed])
        if savings is not None:
            chosen = {**without_given(fastest), **savings}
            generation = _fit_generation(replace_settings(config, chosen), target, estimate)
            return {**chosen, **without_given(generation)}
    return {}


def _fit_generation(config: StepConfig, machine: Machine, estimate: MemoryEstimator) -> Settings:
    """Return the largest useful `generation_batch_size` that fits, or {} without rollouts."""
    work = config.workload(machine.world)
    if not work.generates_first:
        return {}
    generations = {"generate": work.generation, "rollouts": work.rollouts}
    available = machine.gpu_bytes or (machine.host_bytes or 0) // machine.processes
    largest, limits = 1, list[int]()
    for phase in estimate(config).phases:
        if (generation := generations.get(phase.name)) is None:
            continue
        one_slot, all_slots = phase.at_minimum().peak("device"), phase.peak("device")
        slot_bytes = (all_slots - one_slot) / max(1, generation.slots - 1)
        slots = 1 + int((available - one_slot) / slot_bytes) if slot_bytes else generation.slots
        largest = max(largest, generation.max_concurrent)
        limits += [slots] if slots < generation.max_concurrent else []
    return {"generation_batch_size": max(1, min([largest, *limits]))}


def list_savings(
    config: StepConfig, machine: Machine, origins: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield settings that save memory on this machine, the cheapest first."""
    can_shard, stage_2 = machine.world > 1, for_models(config, {"zero_stage": 2})
    tp, pp = _parallel_sizes(config, machine, origins)
    options: list[tuple[bool, Settings]] = [
        (True, {"reuse_forward": False}),
        (True, for_models(config, CHECKPOINTING)),
        (True, {"replica": "release"}),
        (can_shard, stage_2),
        (config.parallel.replicas > 1, {"parallel.replicas": 1}),
        (machine.has_gpu, for_models(config, OFFLOADED)),
        (can_shard, for_models(config, {"zero_stage": 3})),
        *((size <= 8, {"inference_tp_size": size}) for size in tp),
        (machine.has_gpu, for_models(config, WEIGHTS_OFFLOADED)),
        (machine.has_gpu, {"offload_in_generation": True}),
        *((size > config.parallel.tp, {"parallel.tp": size}) for size in tp),
        *((size > config.parallel.pp, {"parallel.pp": size, **stage_2}) for size in pp),
    ]
    for applies, settings in options:
        if applies and all(hasattr(config, name.partition(".")[0]) for name in settings):
            yield dict(settings)


def _parallel_sizes(
    config: StepConfig, machine: Machine, origins: Mapping[str, str]
) -> tuple[list[int], list[int]]:
    """List the sizes above 1 of `parallel.tp` and `parallel.pp` that processes and models allow.

    Model families that can't be sharded fail later, when the memory of a candidate is computed.
    """
    models, _ = build_models(config.workload(machine.world), origins, has_gpu=machine.has_gpu)
    shapes = [model.shape for model in models if model.trained is not None]
    if machine.world == 1 or not shapes:
        return [], []
    heads = math.gcd(*(shape.key_heads for shape in shapes))
    blocks = min(shape.layers for shape in shapes)
    sizes = range(2, machine.world + 1)
    tp = [size for size in sizes if machine.processes % size == 0 and heads % size == 0]
    return tp, [size for size in sizes if machine.world % size == 0 and size <= blocks]


def merge_until_fit(
    config: StepConfig, machine: Machine, estimate: MemoryEstimator, options: Sequence[Settings]
) -> Settings | None:
    """Merge options, in order, until a step fits; return None if it doesn't fit with all of them.

    Settings that turn out to be unnecessary are dropped, the most expensive first; then the
    micro-batch is enlarged as far as possible.
    """

    def fits(settings: Settings) -> bool:
        try:
            candidate = replace_settings(config, settings)
            candidate.check_processes(machine.world)
            return find_shortage(estimate(candidate), machine) is None
        except (ConfigError, ModelError):  # contradict other settings or the model family
            return False

    merged: dict[str, Any] = {}
    for option in options:
        if not option or _saves_memory(config, option):
            merged |= option
            if fits(merged):
                break
    else:
        return None
    for name in reversed(list(merged)):
        reduced = {other: value for other, value in merged.items() if other != name}
        if fits(reduced):
            merged = reduced
    smallest = merged.get("micro_batch_size", config.micro_batch_size)
    sizes = (2**power for power in reversed(range((config.micro_batch_size - 1).bit_length())))
    for size in sizes:
        if size > smallest and fits({**merged, "micro_batch_size": size}):
            return {**merged, "micro_batch_size": size}
    return merged


def _saves_memory(config: StepConfig, settings: Settings) -> bool:
    """Return whether the settings change the step in a way that can save memory."""
    for role, model in trained_models(config).items():
        stage = settings.get(f"{role}.zero_stage", model.zero_stage)
        if stage < model.zero_stage and "parallel.pp" not in settings:
            return False
        if f"{role}.lora.rank" in settings and model.lora and f"{role}.quantize" not in settings:
            return False
    try:
        return replace_settings(config, settings) != config
    except ConfigError:
        return False


def trained_models(config: StepConfig) -> dict[str, TrainedModelConfig]:
    """Return the settings of a step's trained models, by role."""
    uses = config.workload(1).models
    return {use.role: use.settings for use in uses if isinstance(use.settings, TrainedModelConfig)}


def for_models(config: StepConfig, settings: Settings) -> dict[str, Any]:
    """Return these settings for every trained model of the step, prefixed by its role."""
    return {
        f"{role}.{n}": value for role in trained_models(config) for n, value in settings.items()
    }


def replace_settings(config: ConfigT, settings: Settings) -> ConfigT:
    """Return a copy of `config` with these settings; a null `lora` section is created if needed."""
    values = unflatten(settings)
    for name, value in values.items():
        section = getattr(config, name) or (LoraConfig() if name == "lora" else None)
        if isinstance(value, dict) and not isinstance(section, dict):
            values[name] = replace_settings(section, value)
    return replace(config, **values)  # pyrefly: ignore[bad-specialization]
