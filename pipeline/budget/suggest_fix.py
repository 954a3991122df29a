"""The cheapest change that makes a step fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from pipeline.budget.fallbacks import (
    CHECKPOINTING,
    OFFLOADED,
    WEIGHTS_OFFLOADED,
    Settings,
    changed,
    micro_batches,
    of_models,
    trained_models,
)
from pipeline.budget.fit import Shortage, shortage
from pipeline.budget.machine import Machine
from pipeline.budget.mesh_sizes import MeshSizes
from pipeline.budget.table import StepMemory
from pipeline.config import StepConfig
from pipeline.errors import ConfigError

MOST = 1024
"""GPUs that a fix may ask for, at most."""

Count = Callable[[StepConfig, Machine], StepMemory]
"""What the step takes with other settings, or on other machines."""


@dataclass(frozen=True)
class Fix:
    """A change by which a step fits."""

    settings: Settings = field(default_factory=dict[str, object])

    gpus: int | None = None
    """So many are needed for it; None takes those that there are."""


def suggest_fix(
    config: StepConfig,
    machine: Machine,
    count: Count,
    *,
    tp_sizes: Sequence[int] = (),
    mesh: MeshSizes = MeshSizes(),  # noqa: B008  # it is frozen
) -> Fix | None:
    """The cheapest change found, None where nothing helps.

    One option is tried, then all up to one; then the options without what takes main memory, with
    models that are cut; adapters, which change the result, and in the end 4 bits for the weights
    under them; more GPUs.

    Args:
        config: the step's settings.
        machine: has too little for them.
        count: what the step takes.
        tp_sizes: values that `inference_tp_size` may have.
        mesh: values that `parallel.tp` and `parallel.pp` may have.
    """
    search = _Search(config, machine, count)
    fallbacks = list(_fallback_order(config, machine, tp_sizes))
    spare = [*_back(config), *(each for each in fallbacks if not _takes_main_memory(each))]
    adapters = of_models(config, {"lora.rank": 16})
    for options in (fallbacks, spare, *_cuts(config, spare, mesh), [adapters]):
        found = search.first(options)
        if found is not None:
            return Fix(found)
    for kind in (adapters, _quantized(config)):
        for options in (fallbacks, spare):
            found = search.last([*options, kind])
            if found is not None:
                return Fix(found)
    return _on_more_gpus(config, machine, count, (fallbacks, spare)) if machine.has_gpu else None


@dataclass(frozen=True)
class _Search:
    """Settings that fit a machine."""

    config: StepConfig
    machine: Machine
    count: Count
    known: dict[frozenset[tuple[str, object]], bool] = field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]

    def first(self, options: Sequence[Settings]) -> Settings | None:
        """The first option that does, alone or with those before it."""
        steps = self.changes(options)
        for number, settings in enumerate(steps, start=1):
            if self.fits(settings):
                return self.largest(settings)
            if self.fits(together := _merged(steps[:number])):
                return self.least(together)
        return None

    def last(self, options: Sequence[Settings]) -> Settings | None:
        """All options together, without what is not needed."""
        together = _merged(self.changes(options))
        return self.least(together) if self.fits(together) else None

    def changes(self, options: Sequence[Settings]) -> list[Settings]:
        """The changes that ask for more than there is already."""
        return [settings for settings in options if _is_change(self.config, settings)]

    def least(self, settings: Settings) -> Settings:
        """Without what is not needed, the dearest left out first."""
        for name in reversed(list(settings)):
            fewer = {other: value for other, value in settings.items() if other != name}
            if self.fits(fewer):
                settings = fewer
        return self.largest(settings)

    def largest(self, settings: Settings) -> Settings:
        """With the largest micro-batch that fits, where they make it smaller."""
        if "micro_batch_size" not in settings:
            return settings
        sizes = micro_batches(self.config.micro_batch_size)[1:]
        larger = ({**settings, "micro_batch_size": size} for size in sizes)
        return next(filter(self.fits, larger), settings)

    def fits(self, settings: Settings) -> bool:
        """Whether the step does with them; not where they contradict what is there."""
        key = frozenset(settings.items())
        if key not in self.known:
            try:
                other = changed(self.config, settings)
                other.parallel.check(self.machine.world)
                memory = self.count(other, self.machine)
            except ConfigError:
                self.known[key] = False
            else:
                self.known[key] = shortage(memory, self.machine) is None
        return self.known[key]


def _quantized(config: StepConfig) -> Settings:
    """Adapters, where there are none, over weights in 4 bits."""
    return {
        name: value
        for role, model in trained_models(config).items()
        for name, value in ((f"{role}.lora.rank", 16), (f"{role}.quantize", "nf4"))
        if value == "nf4" or model.lora is None
    }


def _on_more_gpus(
    config: StepConfig, machine: Machine, count: Count, fallbacks_of: Sequence[Sequence[Settings]]
) -> Fix | None:
    """The fewest GPUs, at stage 3: as the settings are, or with all options."""
    stage_3 = of_models(config, {"zero_stage": 3})
    workload = config.workload(1)
    most = min(MOST, workload.data_rows) if workload.generates_first else MOST  # a prompt for each
    worlds = [world for n in range(1, 11) if (world := machine.world << n) <= most]
    ways = [[stage_3], *([*options, stage_3] for options in fallbacks_of)]
    if worlds:  # what doesn't fit the most fits none
        largest = _Search(config, replace(machine, world=worlds[-1]), count)
        ways = [options for options in ways if largest.last(options) is not None]
    for world in worlds:
        search = _Search(config, replace(machine, world=world), count)
        for options in ways:
            found = search.last(options)
            if found is not None:
                return Fix(found, world)
    return None


def _merged(steps: Sequence[Settings]) -> Settings:
    """All together, later ones winning."""
    return {name: value for settings in steps for name, value in settings.items()}


def _fallback_order(
    config: StepConfig, machine: Machine, tp_sizes: Sequence[int]
) -> Iterator[Settings]:
    if hasattr(config, "reuse_forward"):
        yield {"reuse_forward": False}
    yield {"micro_batch_size": 1}
    yield of_models(config, CHECKPOINTING)
    if hasattr(config, "replica"):
        yield {"replica": "release"}
    yield from _shared_further(config, machine)
    for size in tp_sizes:  # of a replica that is a whole copy, as at stage 3, each has a part
        if size > getattr(config, "inference_tp_size", size):
            yield {"inference_tp_size": size}
    if machine.has_gpu:
        yield of_models(config, WEIGHTS_OFFLOADED)
    if hasattr(config, "offload_in_generation") and machine.has_gpu:
        yield {"offload_in_generation": True}


def _shared_further(config: StepConfig, machine: Machine) -> Iterator[Settings]:
    """Less of each trained model on a process."""
    if machine.world > 1:
        yield of_models(config, {"zero_stage": 2})
    if config.parallel.replicas > 1:
        yield {"parallel.replicas": 1}
    if machine.has_gpu:
        yield of_models(config, OFFLOADED)
    if machine.world > 1:
        yield of_models(config, {"zero_stage": 3})


def _cuts(
    config: StepConfig, spare: Sequence[Settings], mesh: MeshSizes
) -> Iterator[Sequence[Settings]]:
    """Layers that processes compute together, at any stage; and stages of a pipeline, below 3."""
    layers = [{"parallel.tp": size} for size in mesh.tp if size > config.parallel.tp]
    below_3 = of_models(config, {"zero_stage": 2})
    stages = [{"parallel.pp": n, **below_3} for n in mesh.pp if n > config.parallel.pp]
    if layers:
        yield [*spare, *layers]
    if stages:
        yield [*spare, *stages]
        yield [*spare, *layers, *stages]


def _takes_main_memory(settings: Settings) -> bool:
    return "offload_in_generation" in settings or "cpu" in settings.values()


def _back(config: StepConfig) -> Iterator[Settings]:
    """What lies in main memory, put where the models compute."""
    kinds = ("optimizer", "gradients", "params")
    here = {
        f"{role}.zero.offload.{kind}": "none"
        for role, model in trained_models(config).items()
        for kind in kinds
        if getattr(model.zero.offload, kind) == "cpu"
    }
    if here:
        yield here
    if getattr(config, "offload_in_generation", False):
        yield {"offload_in_generation": False}


def _is_change(config: StepConfig, settings: Settings) -> bool:
    """Whether it asks for more than there is already."""
    for role, model in trained_models(config).items():
        stage = settings.get(f"{role}.zero_stage")
        lower = stage is not None and stage < model.zero_stage
        if lower and "parallel.pp" not in settings:
            return False
        if f"{role}.lora.rank" in settings and model.lora is not None:
            return False
    try:
        return changed(config, settings) != config
    except ConfigError:
        return False


def refusal(step: str, section: str, short: Shortage, fix: Fix | None) -> str:
    """The sentence by which a step that can't fit is refused.

    Args:
        step: what the sentence begins with, as "step 1".
        section: its name before settings on the command line; empty for a step's own.
        short: what there is not enough of.
        fix: what `suggest_fix` has found.
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
    """Settings as the command line has them: --sft.micro_batch_size 2."""
    prefix = f"--{section}." if section else "--"
    return " ".join(f"{prefix}{name} {_spelled(value)}" for name, value in settings.items())


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
