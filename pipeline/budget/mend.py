"""The cheapest change that makes a step fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pipeline.budget.fit import Shortage, shortage
from pipeline.budget.ladder import (
    CHECKPOINTING,
    OFFLOADED,
    Settings,
    changed,
    micro_batches,
    of_models,
    trained_models,
)
from pipeline.budget.machine import Machine
from pipeline.budget.table import StepMemory
from pipeline.config import StepConfig
from pipeline.errors import ConfigError

MOST = 1024
"""GPUs that are tried."""

Count = Callable[[StepConfig, Machine], StepMemory]
"""What the step takes with other settings, or on other machines."""


def mend(config: StepConfig, machine: Machine, count: Count) -> Settings | int | None:
    """Settings by which the step fits, or so many GPUs, or None where nothing helps."""

    def fits(settings: Settings) -> bool:
        try:
            other = changed(config, settings)
        except ConfigError:  # it contradicts a setting that is there
            return False
        return shortage(count(other, machine), machine) is None

    steps = [settings for settings in _ladder(config, machine) if _is_change(config, settings)]
    if fits(_merged(steps)):
        for number, settings in enumerate(steps, start=1):
            if fits(settings):
                return settings
            if fits(together := _merged(steps[:number])):
                return _least(together, fits)
    if not machine.has_gpu:
        return None
    stage_3 = changed(config, of_models(config, {"zero_stage": 3}))
    while machine.world < MOST:
        machine = replace(machine, world=2 * machine.world)
        if shortage(count(stage_3, machine), machine) is None:
            return machine.world
    return None


def _merged(steps: Sequence[Settings]) -> Settings:
    """All together, later ones winning."""
    return {name: value for settings in steps for name, value in settings.items()}


def _least(settings: Settings, fits: Callable[[Settings], bool]) -> Settings:
    """Without what is not needed, the dearest left out first."""
    for name in reversed(list(settings)):
        fewer = {other: value for other, value in settings.items() if other != name}
        if fits(fewer):
            settings = fewer
    return settings


def _ladder(config: StepConfig, machine: Machine) -> Iterator[Settings]:
    for size in micro_batches(config.micro_batch_size)[1:]:
        yield {"micro_batch_size": size}
    yield of_models(config, CHECKPOINTING)
    if machine.world > 1:
        yield of_models(config, {"zero_stage": 2})
    if machine.has_gpu:
        yield of_models(config, OFFLOADED)
    if machine.world > 1:
        yield of_models(config, {"zero_stage": 3})
    if machine.has_gpu:
        yield of_models(config, {"zero_stage": 3, **OFFLOADED, "zero.offload.params": "cpu"})
    if hasattr(config, "offload_in_generation") and machine.has_gpu:
        yield {"offload_in_generation": True}
    yield of_models(config, {"lora.rank": 16})


def _is_change(config: StepConfig, settings: Settings) -> bool:
    """Whether it asks for more than there is already."""
    for role, model in trained_models(config).items():
        stage = settings.get(f"{role}.zero_stage")
        if stage is not None and stage < model.zero_stage:
            return False
        if f"{role}.lora.rank" in settings and model.lora is not None:
            return False
    try:
        return changed(config, settings) != config
    except ConfigError:
        return False


def refusal(step: str, section: str, short: Shortage, mended: Settings | int | None) -> str:
    """The sentence by which a step that can't fit is refused.

    Args:
        step: what the sentence begins with, as "step 1".
        section: its name before settings on the command line; empty for a step's own.
        short: what there is not enough of.
        mended: what `mend` has found.
    """
    start = f"{step} {short}"
    if mended is None:
        return (
            f"{start}; no setting makes it fit: take a smaller model, shorter sequences or a"
            " machine with more memory"
        )
    if isinstance(mended, int):
        return f"{start}; no setting makes it fit: it does on {mended} such GPUs at ZeRO stage 3"
    return f"{start}; it fits with {as_options(section, mended)}"


def as_options(section: str, settings: Settings) -> str:
    """As the command line has them: --sft.micro_batch_size 2."""
    prefix = f"--{section}." if section else "--"
    return " ".join(f"{prefix}{name} {_spelled(value)}" for name, value in settings.items())


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
