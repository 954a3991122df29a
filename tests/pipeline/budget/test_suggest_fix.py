"""The cheapest change that makes a step fit is found and spelled."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.budget.fallbacks import changed, micro_batches, nested
from pipeline.budget.fit import Shortage, shortage
from pipeline.budget.machine import GIB, Machine
from pipeline.budget.mesh_sizes import MeshSizes
from pipeline.budget.step import step_memory
from pipeline.budget.suggest_fix import Fix, refusal, suggest_fix
from pipeline.budget.table import Item, Phase, StepMemory
from pipeline.budget.tp_sizes import tp_sizes
from pipeline.config import LoraConfig, StepConfig, TrainedModelConfig
from pipeline.config.zero import OffloadConfig, ZeroConfig
from step1_sft.config import SFTConfig
from step3_ppo.config import PPOConfig
from tests.families import tiny_config


def config(**settings: Any) -> SFTConfig:
    model = TrainedModelConfig(path="embedded", **settings.pop("model", {}))
    return SFTConfig(model=model, batch_size=32, **settings)


RECOMPUTED = {"micro_batch_size": 1, "model.gradient_checkpointing": True}
OFFLOADED = {"model.zero.offload.optimizer": "cpu", "model.zero.offload.gradients": "cpu"}


def toy(config: StepConfig, machine: Machine) -> StepMemory:
    """100 for the model's state, shared out from stage 2 on; 10 for each row, or 2 recomputed."""
    model: TrainedModelConfig = config.model  # pyright: ignore[reportAttributeAccessIssue]
    state = 100 if model.lora is None else 5 if model.quantize == "none" else 0
    if model.zero_stage >= 2:
        state //= machine.world
    if model.zero.offload.optimizer == "cpu":
        state //= 4
    rows = config.micro_batch_size * (2 if model.gradient_checkpointing else 10)
    return StepMemory((Phase("train", (Item("weights", "model", state + rows),)),))


def gpus(count: int, size: int) -> Machine:
    return Machine(count, count, size, None)


@pytest.mark.parametrize(
    ("count", "size", "settings"),
    [
        (1, 140, {"micro_batch_size": 4}),  # 100 + 40
        (1, 117, {"micro_batch_size": 1}),
        (1, 109, {"micro_batch_size": 4, "model.gradient_checkpointing": True}),  # 100 + 8
        (4, 105, {"micro_batch_size": 2, "model.gradient_checkpointing": True}),
        (4, 46, {"micro_batch_size": 2, "model.zero_stage": 2}),  # 25 + 20
        (1, 27, {**RECOMPUTED, "model.zero.offload.optimizer": "cpu"}),
        (
            2,
            9,
            {"micro_batch_size": 2, "model.gradient_checkpointing": True, "model.lora.rank": 16},
        ),
        (
            1,
            2,
            {
                "micro_batch_size": 1,
                "model.gradient_checkpointing": True,
                "model.lora.rank": 16,
                "model.quantize": "nf4",
            },
        ),
        (1, 1, None),
    ],
)
def test_one_change_alone_is_tried_first_and_then_all_up_to_one(
    count: int, size: int, settings: Any
) -> None:
    machine = gpus(count, size)
    start = config(micro_batch_size=8)
    found = suggest_fix(start, machine, toy)

    assert found == (None if settings is None else Fix(settings))


def test_what_is_in_use_is_not_proposed() -> None:
    there = config(micro_batch_size=1, model={"gradient_checkpointing": True, "zero_stage": 3})

    assert suggest_fix(there, gpus(1, 30), toy) == Fix(OFFLOADED)


def test_more_gpus_come_last() -> None:
    start = config(micro_batch_size=1, model={"gradient_checkpointing": True, "zero_stage": 3})

    def heavy(_: StepConfig, machine: Machine) -> StepMemory:
        item = Item("weights", "model", 1000 // machine.world)
        return StepMemory((Phase("train", (item,)),))

    assert suggest_fix(start, gpus(2, 100), heavy) == Fix({}, gpus=16)
    assert suggest_fix(start, replace(gpus(2, 100), gpu_bytes=None, host_bytes=100), heavy) is None


def test_more_gpus_come_with_the_settings_that_they_take() -> None:
    def blocks(config: StepConfig, machine: Machine) -> StepMemory:
        """State shared out at stage 3 alone, and rows that take more than the rest has room for."""
        model: TrainedModelConfig = config.model  # pyright: ignore[reportAttributeAccessIssue]
        state = 800 // (machine.world if model.zero_stage == 3 else 1)
        rows = 30 * config.micro_batch_size
        return StepMemory((Phase("train", (Item("weights", "model", state + rows),)),))

    found = suggest_fix(config(micro_batch_size=4), gpus(1, 60), blocks)

    assert found == Fix({"micro_batch_size": 1, "model.zero_stage": 3}, gpus=32)


def test_what_lacks_main_memory_is_not_offloaded() -> None:
    """Offload alone would make room on the GPU, and a sharded state does without it."""

    def both(config: StepConfig, machine: Machine) -> StepMemory:
        model: TrainedModelConfig = config.model  # pyright: ignore[reportAttributeAccessIssue]
        state = 100 // (machine.world if model.zero_stage >= 2 else 1)
        away = model.zero.offload.optimizer == "cpu"
        items = (Item("weights", "model", 0 if away else state),)
        return StepMemory(
            (Phase("train", (*items, Item("moments", "model", away * state, "host"))),)
        )

    start = config(micro_batch_size=1, model={"gradient_checkpointing": True})
    machine = replace(gpus(4, 20), host_bytes=10)

    assert suggest_fix(start, machine, both) == Fix({"model.zero_stage": 3}, gpus=8)
    assert suggest_fix(start, replace(machine, gpu_bytes=25), both) == Fix({"model.zero_stage": 2})
    offload = OffloadConfig(optimizer="cpu", gradients="cpu")
    there = config(micro_batch_size=1, model={"zero": ZeroConfig(offload=offload)})
    back = {f"model.zero.offload.{kind}": "none" for kind in ("optimizer", "gradients")}
    assert suggest_fix(there, replace(machine, gpu_bytes=100), both) == Fix(back)


def test_step_3_may_generate_by_more_processes_together() -> None:
    def generating(config: StepConfig, _: Machine) -> StepMemory:
        ppo: PPOConfig = config  # pyright: ignore[reportAssignmentType]
        replica = 80 // ppo.inference_tp_size
        kept = replica if ppo.replica == "resident" else 0
        phases = (
            Phase("generate", (Item("replica", "actor", replica),)),
            Phase("train", (Item("weights", "actor", 50 + kept),)),
        )
        return StepMemory(phases)

    start = PPOConfig(micro_batch_size=1)
    assert suggest_fix(start, gpus(4, 60), generating, tp_sizes=(1, 2, 4)) == Fix(
        {"inference_tp_size": 2}
    )
    assert suggest_fix(start, gpus(4, 60), generating, tp_sizes=(1,)) is None
    resident = replace(start, replica="resident")
    assert suggest_fix(resident, gpus(4, 80), generating, tp_sizes=(1, 2)) == Fix(
        {"replica": "release"}
    )


def test_step_3_may_run_its_models_again_before_it_learns() -> None:
    """What is kept of a rollout's pass until its update is the first thing to be given up."""

    def kept(config: StepConfig, _: Machine) -> StepMemory:
        ppo: PPOConfig = config  # pyright: ignore[reportAssignmentType]
        items = (Item("graphs", "actor", (30 if ppo.reuse_forward else 20) * ppo.micro_batch_size),)
        return StepMemory((Phase("train", items),))

    start = PPOConfig(micro_batch_size=2, replica="release")

    assert suggest_fix(start, gpus(1, 59), kept) == Fix({"reuse_forward": False})
    assert suggest_fix(start, gpus(1, 39), kept) == Fix({"micro_batch_size": 1})
    assert suggest_fix(start, gpus(1, 29), kept) == Fix(
        {"reuse_forward": False, "micro_batch_size": 1}
    )


@pytest.mark.parametrize(
    ("family", "shape", "processes", "sizes"),
    [
        ("llama", {}, 8, (1, 2, 4)),  # 4 heads
        ("llama", {}, 6, (1, 2)),
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 3}, 8, (1,)),
        ("llama", {"intermediate_size": 50}, 4, (1, 2)),
        ("opt", {}, 8, (1, 2, 4)),
        ("gpt_oss", {}, 2, (1,)),  # a mixture of experts
        ("llama", {}, 1, (1,)),
    ],
)
def test_processes_that_generate_together_divide_the_actors_heads(
    family: str, shape: Any, processes: int, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    tiny_config(family, **shape).save_pretrained(tmp_path)
    lora = TrainedModelConfig(path=str(tmp_path), lora=LoraConfig(rank=2))

    assert tp_sizes(PPOConfig(actor=lora), processes=processes) == sizes
    made = replace(lora, path="out/step1_sft")
    origins = {"out/step1_sft": str(tmp_path)}
    assert tp_sizes(PPOConfig(actor=made), processes=processes, origins=origins) == sizes
    assert tp_sizes(PPOConfig(actor=made), processes=processes) == (1,)
    assert tp_sizes(config(), processes=processes) == ()


SHORT = Shortage(Phase("train", ()), "each GPU", needed=31 * GIB, there=24 * GIB)


@pytest.mark.parametrize(
    ("fix", "end"),
    [
        (
            Fix({"micro_batch_size": 2, "model.gradient_checkpointing": True}),
            "; it fits with --sft.micro_batch_size 2 --sft.model.gradient_checkpointing true",
        ),
        (Fix({}, gpus=16), "; it fits on 16 such GPUs"),
        (
            Fix({"model.zero_stage": 3}, gpus=16),
            "; it fits on 16 such GPUs with --sft.model.zero_stage 3",
        ),
        (
            None,
            "; nothing that saves memory makes it fit: take a smaller model, shorter sequences or a"
            " machine with more memory",
        ),
    ],
)
def test_a_refusal_is_one_sentence(fix: Any, end: str) -> None:
    start = "step 1 takes 31.0 GiB on each GPU to train, and there are 24.0 GiB"

    assert refusal("step 1", "sft", SHORT, fix) == start + end


def test_settings_are_changed_by_their_dotted_names() -> None:
    start = config(micro_batch_size=8)

    found = changed(
        start,
        {"micro_batch_size": 2, "model.zero.offload.optimizer": "cpu", "model.lora.rank": 4},
    )

    assert found.micro_batch_size == 2
    assert found.model.zero.offload.optimizer == "cpu"
    assert found.model.lora == LoraConfig(rank=4)
    assert found.model.path == "embedded"
    assert start.model.lora is None
    assert nested({"a.b.c": 1, "a.d": 2, "e": 3}) == {"a": {"b": {"c": 1}, "d": 2}, "e": 3}


def test_sizes_go_down_by_powers_of_two() -> None:
    assert micro_batches(12) == [12, 8, 4, 2, 1]
    assert micro_batches(8) == [8, 4, 2, 1]
    assert micro_batches(1) == [1]


def in_parts(config: StepConfig, _machine: Machine) -> StepMemory:
    """40 for each process that has the model whole, in no more parts than those of tp and pp."""
    parts = config.parallel.tp * config.parallel.pp
    model: TrainedModelConfig = config.model  # pyright: ignore[reportAttributeAccessIssue]
    own = 40 // parts if model.lora is None else 1
    return StepMemory((Phase("train", (Item("weights", "model", own),)),))


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (20, {"parallel.tp": 2}),
        (10, {"parallel.pp": 4, "model.zero_stage": 2}),
        (5, {"parallel.tp": 2, "parallel.pp": 4}),
        (4, {"model.lora.rank": 16}),
    ],
)
def test_models_are_cut_before_the_result_is_another(size: int, settings: Any) -> None:
    mesh = MeshSizes(pp=(1, 2, 4), tp=(1, 2))

    found = suggest_fix(config(micro_batch_size=1), gpus(8, size), in_parts, mesh=mesh)

    assert found is not None
    given = {name: value for name, value in found.settings.items() if value != 2 or "tp" in name}
    assert given == {name: value for name, value in settings.items() if "zero" not in name}
    assert found.gpus is None


def test_what_is_not_known_is_never_refused() -> None:
    unknown = replace(config(), model=TrainedModelConfig(path="someone/unknown"))
    memory = step_memory(unknown, machine=gpus(1, GIB))

    assert memory.unknown
    assert shortage(memory, gpus(1, GIB)) is None
