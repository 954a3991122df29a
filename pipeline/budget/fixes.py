"""Changes of settings that save memory: the one that makes a step fit, and those of `--plan auto`.

The order is DeepSpeed's: smaller micro-batches, recomputation, stage 2, an offloaded optimizer,
stage 3, offloaded weights; then tensor and pipeline parallelism, adapters, more GPUs.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pipeline.budget.fit import Shortage, shortage
from pipeline.budget.machine import Machine
from pipeline.budget.memory import StepMemory
from pipeline.budget.models import models_of
from pipeline.config import LoraConfig, StepConfig, TrainedModelConfig
from pipeline.errors import ConfigError, ModelError

ConfigT = TypeVar("ConfigT")

Settings = Mapping[str, Any]
"""Values by dotted name, as in a file of settings: {"model.zero_stage": 2}."""

Count = Callable[[StepConfig, Machine], StepMemory]
"""The memory of a step with other settings, or on other machines."""

CHECKPOINTING: Settings = {"gradient_checkpointing": True}
OFFLOADED: Settings = {"zero.offload.optimizer": "cpu", "zero.offload.gradients": "cpu"}
WEIGHTS_OFFLOADED: Settings = {"zero_stage": 3, **OFFLOADED, "zero.offload.params": "cpu"}

MOST_GPUS = 1024
"""GPUs that a fix asks for, at most."""

ENOUGH_TOKENS = 2048
"""Tokens of a micro-batch below which recomputation or another stage is the better choice."""

MOST_TOKENS = 16384
"""Tokens of a micro-batch above which larger ones are not faster."""


def trained_models(config: StepConfig) -> dict[str, TrainedModelConfig]:
    """The models of a step that learn, by role."""
    uses = config.workload(1).models
    return {use.role: use.settings for use in uses if isinstance(use.settings, TrainedModelConfig)}


def of_models(config: StepConfig, settings: Settings) -> dict[str, Any]:
    """These settings for every model of the step that learns."""
    return {
        f"{role}.{n}": value for role in trained_models(config) for n, value in settings.items()
    }


def changed(config: ConfigT, settings: Settings) -> ConfigT:
    """A dataclass of settings with other values; sections that are null are made as needed."""
    by_head: dict[str, dict[str, Any]] = {}
    values: dict[str, Any] = {}
    for name, value in settings.items():
        head, _, rest = name.partition(".")
        if rest:
            by_head.setdefault(head, {})[rest] = value
        else:
            values[head] = value
    for head, inner in by_head.items():
        section = getattr(config, head)
        if head == "lora" and section is None:
            section = LoraConfig()
        values[head] = changed(section, inner)
    return replace(config, **values)  # pyright: ignore[reportArgumentType, reportReturnType]


def nested(settings: Settings) -> dict[str, Any]:
    """The settings by section, as files of settings have them."""
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, leaf = name.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[leaf] = value
    return tree


def micro_batches(most: int) -> list[int]:
    """Sizes to try, the largest first: `most`, and powers of two below it."""
    return [most, *(2**power for power in reversed(range(most.bit_length())) if 2**power < most)]


@dataclass(frozen=True)
class MeshSizes:
    """Values above 1 of `parallel.tp`, `parallel.pp` and `inference_tp_size` that are possible."""

    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    inference_tp: tuple[int, ...] = ()


def mesh_sizes(config: StepConfig, machine: Machine, origins: Mapping[str, str]) -> MeshSizes:
    """The sizes that the processes, and heads and blocks of the models that learn, allow.

    Families that can't be divided are found when the memory of a candidate is computed.
    """
    every = models_of(config.workload(machine.world), origins, has_gpu=machine.has_gpu)
    models = [model for model in every if model.trained is not None and model.module is not None]
    if machine.world == 1 or not models:
        return MeshSizes()
    heads = math.gcd(*(model.shape.key_heads for model in models))
    blocks = min(model.shape.layers for model in models)
    sizes = range(2, machine.world + 1)
    tp = tuple(n for n in sizes if machine.processes % n == 0 and heads % n == 0)
    pp = tuple(n for n in sizes if machine.world % n == 0 and n <= blocks)
    inference = tuple(n for n in tp if n <= 8) if hasattr(config, "inference_tp_size") else ()
    return MeshSizes(tp, pp, inference)


@dataclass(frozen=True)
class Fix:
    """A change by which a step fits."""

    settings: Settings

    gpus: int | None = None
    """Number of GPUs that it needs; None is the machine's."""


def suggest_fix(
    config: StepConfig,
    machine: Machine,
    count: Count,
    mesh: MeshSizes = MeshSizes(),
) -> Fix | None:
    """The cheapest change found; None where nothing helps.

    One option is tried, then all up to it; then the options without main memory, adapters, and
    in the end more GPUs.
    """
    search = _Search(config, machine, count)
    options = list(_fallbacks(config, machine, mesh))
    spare = [each for each in options if "cpu" not in each.values()]
    adapters = of_models(config, {"lora.rank": 16})
    quantized = {**adapters, **of_models(config, {"quantize": "nf4"})}
    for list_ in (options, spare, [*options, adapters], [*spare, adapters, quantized]):
        found = search.first(list_)
        if found is not None:
            return Fix(found)
    world = machine.world * 2
    while machine.has_gpu and world <= MOST_GPUS:
        larger = _Search(config, replace(machine, world=world), count)
        stage_3 = of_models(config, {"zero_stage": 3})
        for together in ([stage_3], [*spare, stage_3]):
            found = larger.last(together)
            if found is not None:
                return Fix(found, world)
        world *= 2
    return None


def _fallbacks(config: StepConfig, machine: Machine, mesh: MeshSizes) -> Iterator[Settings]:
    if hasattr(config, "reuse_forward"):
        yield {"reuse_forward": False}
    yield {"micro_batch_size": 1}
    yield of_models(config, CHECKPOINTING)
    if hasattr(config, "replica"):
        yield {"replica": "release"}
    if machine.world > 1:
        yield of_models(config, {"zero_stage": 2})
    if config.parallel.replicas > 1:
        yield {"parallel.replicas": 1}
    if machine.has_gpu:
        yield of_models(config, OFFLOADED)
    if machine.world > 1:
        yield of_models(config, {"zero_stage": 3})
    yield from ({"inference_tp_size": size} for size in mesh.inference_tp)
    if machine.has_gpu:
        yield of_models(config, WEIGHTS_OFFLOADED)
    if hasattr(config, "offload_in_generation") and machine.has_gpu:
        yield {"offload_in_generation": True}
    yield from ({"parallel.tp": size} for size in mesh.tp if size > config.parallel.tp)
    below_3 = of_models(config, {"zero_stage": 2})
    yield from ({"parallel.pp": n, **below_3} for n in mesh.pp if n > config.parallel.pp)


@dataclass(frozen=True)
class _Search:
    """Settings that fit a machine."""

    config: StepConfig
    machine: Machine
    count: Count
    known: dict[frozenset[tuple[str, Any]], bool] = field(
        default_factory=dict[frozenset[tuple[str, Any]], bool]
    )

    def first(self, options: Sequence[Settings]) -> Settings | None:
        """The first option that fits, alone or with those before it."""
        steps = [settings for settings in options if _is_change(self.config, settings)]
        for number, settings in enumerate(steps, start=1):
            if self.fits(settings):
                return self.largest(settings)
            together = _merged(steps[:number])
            if self.fits(together):
                return self.least(together)
        return None

    def last(self, options: Sequence[Settings]) -> Settings | None:
        """All options together, without those that are not needed."""
        together = _merged([each for each in options if _is_change(self.config, each)])
        return self.least(together) if self.fits(together) else None

    def least(self, settings: Settings) -> Settings:
        """Without what is not needed, the most expensive left out first."""
        for name in reversed(list(settings)):
            fewer = {other: value for other, value in settings.items() if other != name}
            if self.fits(fewer):
                settings = fewer
        return self.largest(settings)

    def largest(self, settings: Settings) -> Settings:
        """With the largest micro-batch that fits, where the settings make it smaller."""
        if "micro_batch_size" not in settings:
            return settings
        sizes = micro_batches(self.config.micro_batch_size)[1:]
        larger = ({**settings, "micro_batch_size": size} for size in sizes)
        return next(filter(self.fits, larger), settings)

    def fits(self, settings: Settings) -> bool:
        """Whether the step fits with them; not where they contradict other settings."""
        key = frozenset(settings.items())
        if key not in self.known:
            try:
                other = changed(self.config, settings)
                other.parallel.check(self.machine.world)
                memory = self.count(other, self.machine)
            except (ConfigError, ModelError):
                self.known[key] = False
            else:
                self.known[key] = shortage(memory, self.machine) is None
        return self.known[key]


def _merged(steps: Sequence[Settings]) -> Settings:
    """All together, later ones winning."""
    return {name: value for settings in steps for name, value in settings.items()}


def _is_change(config: StepConfig, settings: Settings) -> bool:
    """Whether the settings save more than those that there are."""
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


def refusal(step: str, section: str, short: Shortage, fix: Fix | None) -> str:
    """The sentence by which a step that can't fit is refused.

    Args:
        step: beginning of the sentence, as "step 1".
        section: prefix of the settings on the command line; empty for a step's own.
        short: the lack of memory.
        fix: the result of `suggest_fix`.
    """
    start = f"{step} {short}"
    if fix is None:
        return (
            f"{start}; nothing that saves memory makes it fit: take a smaller model, shorter"
            " sequences or a machine with more memory"
        )
    options = as_options(section, fix.settings)
    if fix.gpus is not None:
        return f"{start}; it fits on {fix.gpus} such GPUs{options and f' with {options}'}"
    return f"{start}; it fits with {options}"


def as_options(section: str, settings: Settings) -> str:
    """Settings as options: --sft.micro_batch_size 2."""
    prefix = f"--{section}." if section else "--"
    return " ".join(f"{prefix}{name} {_spelled(value)}" for name, value in settings.items())


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def rungs(config: StepConfig, machine: Machine, mesh: MeshSizes) -> Iterator[Settings]:
    """Settings of `--plan auto` without a micro-batch, the fastest first."""
    many = machine.world > 1
    stages = [{"zero_stage": 2}, {"zero_stage": 3}] if many else [{"zero_stage": 0}]
    for stage in stages:
        for recomputation in ({}, CHECKPOINTING):
            yield of_models(config, {**stage, **recomputation})
    for pp in (1, *mesh.pp):
        for tp in (1, *mesh.tp):
            if pp * tp > 1 and machine.world % (pp * tp) == 0:
                stage = {"zero_stage": 2 if pp > 1 else 3, **CHECKPOINTING}
                cut = {name: size for name, size in (("tp", tp), ("pp", pp)) if size > 1}
                parallel = {f"parallel.{name}": size for name, size in cut.items()}
                yield {**parallel, **of_models(config, stage)}
    if machine.has_gpu:
        for stage in stages:
            for recomputation in ({}, CHECKPOINTING):
                yield of_models(config, {**stage, **recomputation, **OFFLOADED})
        yield of_models(config, {**CHECKPOINTING, **WEIGHTS_OFFLOADED})
