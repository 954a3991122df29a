"""Changes of settings that save memory, the cheapest first.

The order is DeepSpeed's: one sequence at a time, recomputation, stage 2, an offloaded optimizer,
stage 3, offloaded weights; after them what changes the result or the bill: adapters, more GPUs.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from pipeline.config import LoraConfig, StepConfig, TrainedModelConfig

ConfigT = TypeVar("ConfigT")

Settings = Mapping[str, Any]
"""Values by dotted name, as in a file of settings: {"model.zero_stage": 2}."""

CHECKPOINTING: Settings = {"gradient_checkpointing": True}
OFFLOADED: Settings = {"zero.offload.optimizer": "cpu", "zero.offload.gradients": "cpu"}
WEIGHTS_OFFLOADED: Settings = {"zero_stage": 3, **OFFLOADED, "zero.offload.params": "cpu"}


def micro_batches(most: int) -> list[int]:
    """Sizes to try, the largest first: powers of two below `most`, after it."""
    return [most, *(2**power for power in reversed(range(most.bit_length())) if 2**power < most)]


def trained_models(config: StepConfig) -> dict[str, TrainedModelConfig]:
    """The models of a step that learn, by role."""
    uses = config.workload(1).models
    return {use.role: use.settings for use in uses if isinstance(use.settings, TrainedModelConfig)}


def of_models(config: StepConfig, settings: Settings) -> dict[str, Any]:
    """These settings for every model of the step that learns."""
    return {
        f"{role}.{name}": value
        for role in trained_models(config)
        for name, value in settings.items()
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
