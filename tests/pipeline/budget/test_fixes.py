"""The cheapest change that makes a step fit."""

from dataclasses import replace
from typing import Any

import pytest

from pipeline.budget.fit import suggest_fix
from pipeline.budget.machine import Machine
from pipeline.budget.memory import Item, Phase, StepMemory
from pipeline.config import StepConfig, TrainedModelConfig
from step1_sft.config import SFTConfig


def make_config(**settings: Any) -> SFTConfig:
    model = TrainedModelConfig(path="embedded", **settings.pop("model", {}))
    return SFTConfig(model=model, batch_size=32, **settings)


def compute_toy_memory(config: StepConfig, machine: Machine) -> StepMemory:
    """Return 100 for the model's state, sharded from stage 2 on; 10 per row, or 2 recomputed."""
    model: TrainedModelConfig = config.model
    state = 100 if model.lora is None else 5 if model.quantize == "none" else 0
    if model.zero_stage >= 2:
        state //= machine.world
    if model.zero.offload.optimizer == "cpu":
        state //= 4
    rows = config.micro_batch_size * (2 if model.gradient_checkpointing else 10)
    tp = config.parallel.tp
    return StepMemory((Phase("train", (Item("weights", state / tp + rows),)),))


def make_machine(count: int, size: int) -> Machine:
    return Machine(count, count, size, None)


RECOMPUTED = {"model.gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("count", "size", "settings"),
    [
        (1, 140, {"micro_batch_size": 4}),  # 100 + 40
        (1, 109, {"micro_batch_size": 4, **RECOMPUTED}),  # 100 + 8
        (4, 46, {"micro_batch_size": 2, "model.zero_stage": 2}),  # 25 + 20
        (1, 27, {"micro_batch_size": 1, **RECOMPUTED, "model.zero.offload.optimizer": "cpu"}),
        (1, 1, None),
    ],
)
def test_fix_prefers_one_change_to_several(count: int, size: int, settings: Any) -> None:
    machine = make_machine(count, size)

    fix = suggest_fix(
        make_config(micro_batch_size=8), machine, lambda config: compute_toy_memory(config, machine)
    )

    assert fix == settings


def test_fix_shards_if_host_memory_is_too_small_to_offload() -> None:
    def compute_memory(config: StepConfig) -> StepMemory:
        model: TrainedModelConfig = config.model
        state = 100 // (4 if model.zero_stage >= 2 else 1)
        offloads = model.zero.offload.optimizer == "cpu"
        items = (Item("weights", 0 if offloads else state),)
        return StepMemory((Phase("train", (*items, Item("moments", offloads * state, "host"))),))

    start = make_config(micro_batch_size=1, model={"gradient_checkpointing": True})
    machine = replace(make_machine(4, 25), host_bytes=10)

    assert suggest_fix(start, machine, compute_memory) == {"model.zero_stage": 2}
