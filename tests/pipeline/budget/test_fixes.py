"""The cheapest change that makes a step fit."""

from dataclasses import replace
from typing import Any

import pytest

from pipeline.budget.fit import Shortage
from pipeline.budget.fixes import (
    Fix,
    MeshSizes,
    changed,
    mesh_sizes,
    micro_batches,
    nested,
    refusal,
    suggest_fix,
)
from pipeline.budget.machine import GIB, Machine
from pipeline.budget.memory import Item, Phase, StepMemory
from pipeline.config import LoraConfig, StepConfig, TrainedModelConfig
from step1_sft.config import SFTConfig


def config(**settings: Any) -> SFTConfig:
    model = TrainedModelConfig(path="embedded", **settings.pop("model", {}))
    return SFTConfig(model=model, batch_size=32, **settings)


def toy(config: StepConfig, machine: Machine) -> StepMemory:
    """100 for the model's state, sharded from stage 2 on; 10 for each row, or 2 recomputed."""
    model: TrainedModelConfig = config.model  # pyright: ignore[reportAttributeAccessIssue]
    state = 100 if model.lora is None else 5 if model.quantize == "none" else 0
    if model.zero_stage >= 2:
        state //= machine.world
    if model.zero.offload.optimizer == "cpu":
        state //= 4
    rows = config.micro_batch_size * (2 if model.gradient_checkpointing else 10)
    tp = config.parallel.tp
    return StepMemory((Phase("train", (Item("weights", "model", state / tp + rows),)),))


def gpus(count: int, size: int) -> Machine:
    return Machine(count, count, size, None)


RECOMPUTED = {"model.gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("count", "size", "settings"),
    [
        (1, 140, {"micro_batch_size": 4}),  # 100 + 40
        (1, 117, {"micro_batch_size": 1}),
        (1, 109, {"micro_batch_size": 4, **RECOMPUTED}),  # 100 + 8
        (4, 46, {"micro_batch_size": 2, "model.zero_stage": 2}),  # 25 + 20
        (1, 27, {"micro_batch_size": 1, **RECOMPUTED, "model.zero.offload.optimizer": "cpu"}),
        (1, 1, None),
    ],
)
def test_one_change_is_tried_first_and_then_all_up_to_it(
    count: int, size: int, settings: Any
) -> None:
    found = suggest_fix(config(micro_batch_size=8), gpus(count, size), toy)

    assert found == (None if settings is None else Fix(settings))


def test_quantized_adapters_come_after_all_else() -> None:
    found = suggest_fix(config(micro_batch_size=8), gpus(1, 2), toy)

    assert found is not None
    assert found.settings["model.quantize"] == "nf4"
    assert found.settings["model.lora.rank"] == 16


def test_tensor_parallelism_comes_before_adapters() -> None:
    start = config(micro_batch_size=1, model={"gradient_checkpointing": True, "zero_stage": 3})
    machine = replace(gpus(2, 20), gpu_bytes=None, host_bytes=2 * 30)

    assert suggest_fix(start, machine, toy, MeshSizes(tp=(2,))) == Fix({"parallel.tp": 2})


def test_more_gpus_come_last() -> None:
    start = config(micro_batch_size=1, model={"gradient_checkpointing": True, "zero_stage": 3})

    def heavy(_: StepConfig, machine: Machine) -> StepMemory:
        item = Item("weights", "model", 1000 // machine.world)
        return StepMemory((Phase("train", (item,)),))

    assert suggest_fix(start, gpus(2, 100), heavy) == Fix({}, gpus=16)
    assert suggest_fix(start, replace(gpus(2, 100), gpu_bytes=None, host_bytes=100), heavy) is None


def test_a_machine_without_main_memory_shards_rather_than_offloads() -> None:
    def both(config: StepConfig, machine: Machine) -> StepMemory:
        model: TrainedModelConfig = config.model  # pyright: ignore[reportAttributeAccessIssue]
        state = 100 // (machine.world if model.zero_stage >= 2 else 1)
        offloads = model.zero.offload.optimizer == "cpu"
        items = (Item("weights", "model", 0 if offloads else state),)
        return StepMemory(
            (Phase("train", (*items, Item("moments", "model", offloads * state, "host"))),)
        )

    start = config(micro_batch_size=1, model={"gradient_checkpointing": True})
    machine = replace(gpus(4, 25), host_bytes=10)

    assert suggest_fix(start, machine, both) == Fix({"model.zero_stage": 2})


def test_the_refusal_spells_the_fix_as_options() -> None:
    short = Shortage(Phase("train", ()), "each GPU", needed=3 * GIB, available=2 * GIB)
    fix = Fix({"micro_batch_size": 2, "model.gradient_checkpointing": True})

    assert refusal("step 1", "sft", short, fix) == (
        "step 1 takes 3.0 GiB on each GPU to train, and there are 2.0 GiB; it fits with"
        " --sft.micro_batch_size 2 --sft.model.gradient_checkpointing true"
    )
    assert "it fits on 16 such GPUs" in refusal("step 1", "sft", short, Fix({}, gpus=16))
    assert "nothing that saves memory" in refusal("step 1", "sft", short, None)


def test_settings_by_dotted_names() -> None:
    start = config()

    lora = changed(start, {"model.lora.rank": 4, "micro_batch_size": 2})

    assert (lora.model.lora, lora.micro_batch_size) == (LoraConfig(rank=4), 2)
    assert nested({"a.b": 1, "a.c.d": 2, "e": 3}) == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert micro_batches(6) == [6, 4, 2, 1]


def test_mesh_sizes_divide_processes_heads_and_blocks() -> None:
    sizes = mesh_sizes(config(), Machine(4, 4, None, None), {})

    assert mesh_sizes(config(), Machine(1, 1, None, None), {}) == MeshSizes()
    assert 2 in sizes.tp
    assert 2 in sizes.pp
