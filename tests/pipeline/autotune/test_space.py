from pathlib import Path
from typing import Any

import pytest

from pipeline.autotune.space import AS_IT_IS, known_dimensions, make_space
from pipeline.budget.machine import GIB, Machine
from pipeline.budget.mesh_sizes import MeshSizes
from pipeline.config import StepConfig, TrainedModelConfig
from pipeline.config.zero import OffloadConfig, ZeroConfig
from pipeline.errors import ConfigError
from step1_sft.config import SFTConfig
from step3_ppo.config import PPOConfig

CPU = Machine(1, 1, None, None)
TWO_CPUS = Machine(2, 2, None, None)
GPU = Machine(1, 1, 80 * GIB, None)
TWO_GPUS = Machine(2, 2, 80 * GIB, None)


def values(config: StepConfig, machine: Machine) -> dict[str, tuple[object, ...]]:
    return {each.name: each.values for each in make_space(config, machine).dimensions}


def test_the_candidates_stand_in_the_order_of_the_ladder() -> None:
    space = make_space(SFTConfig(batch_size=4, micro_batch_size=2), TWO_GPUS)

    names = [each.name for each in space.dimensions]
    assert names == ["zero_stage", "offload", "gradient_checkpointing", "micro_batch_size"]
    assert space.candidates[:4] == (
        (0, "none", False, 1),
        (0, "none", False, 2),
        (0, "none", True, 1),
        (0, "none", True, 2),
    )
    options = list(dict.fromkeys(each[:2] for each in space.candidates))
    assert options == [
        *((stage, offload) for stage in (0, 1, 2) for offload in ("none", "optimizer+gradients")),
        *(
            (3, offload)
            for offload in ("none", "optimizer+gradients", "optimizer+gradients+params")
        ),
    ]
    assert space.start == (0, "none", False, 2)


def test_a_processor_has_nothing_to_offload_and_one_process_nothing_to_share_out() -> None:
    config = SFTConfig(batch_size=32, micro_batch_size=8)

    assert values(config, CPU) == {
        "gradient_checkpointing": (False, True),
        "micro_batch_size": (1, 2, 4, 8, 16, 32),
    }
    assert values(config, TWO_CPUS)["zero_stage"] == (0, 1, 2, 3)
    assert values(config, TWO_CPUS)["micro_batch_size"] == (1, 2, 4, 8, 16)


def test_sizes_that_hold_all_rows_of_a_process_are_one_candidate() -> None:
    config = PPOConfig(rollout_size=16, batch_size=8, micro_batch_size=6, generation_batch_size=64)

    found = values(config, TWO_CPUS)

    assert found["micro_batch_size"] == (1, 2, 6)  # four rows of a minibatch on each
    assert found["generation_batch_size"] == (2, 4, 64)  # eight prompts
    assert make_space(config, TWO_CPUS).start is not None


def test_one_gpu_shards_only_what_it_offloads() -> None:
    space = make_space(SFTConfig(batch_size=1, micro_batch_size=1), GPU)

    assert {each[:2] for each in space.candidates} == {
        (0, "none"),
        (0, "optimizer+gradients"),
        (3, "optimizer+gradients+params"),
    }


def test_a_candidate_is_the_settings_of_all_models_that_learn() -> None:
    config = PPOConfig(rollout_size=8, batch_size=8)
    space = make_space(config, TWO_GPUS, tp_sizes=(1, 2))
    named = {
        "zero_stage": 3,
        "offload": "optimizer+gradients+params",
        "gradient_checkpointing": True,
        "generation_batch_size": 2,
        "inference_tp_size": 2,
        "offload_in_generation": True,
        "micro_batch_size": 1,
    }

    made = space.config(space.candidate(named))

    assert isinstance(made, PPOConfig)
    for model in (made.actor, made.critic):
        assert (model.zero_stage, model.gradient_checkpointing) == (3, True)
        assert model.zero.offload == OffloadConfig(optimizer="cpu", gradients="cpu", params="cpu")
    assert (made.generation_batch_size, made.inference_tp_size) == (2, 2)
    assert made.actor.optim == config.actor.optim
    assert made.micro_batch_size == 1


def test_what_the_command_line_says_stays() -> None:
    space = make_space(
        PPOConfig(),
        TWO_GPUS,
        fixed=["actor.zero_stage", "actor.zero.offload.optimizer", "seed", "critic"],
    )

    (stage,) = (each for each in space.dimensions if each.name == "zero_stage")
    (offload,) = (each for each in space.dimensions if each.name == "offload")
    assert stage.settings == ("critic.zero_stage",)
    assert offload.settings == ("critic.zero.offload",)


def test_what_is_offloaded_to_a_disk_stays_there() -> None:
    zero = ZeroConfig(offload=OffloadConfig(optimizer="nvme", nvme_path=Path("disk")))
    config = SFTConfig(model=TrainedModelConfig(path="m", zero_stage=1, zero=zero))

    space = make_space(config, TWO_GPUS)

    assert "offload" not in [each.name for each in space.dimensions]
    assert space.start == space.candidate(
        {"zero_stage": 1, "gradient_checkpointing": False, "micro_batch_size": 8}
    )


def test_given_values_take_the_place_of_the_usual_ones() -> None:
    given = {
        "zero_stage": "0,2",
        "micro_batch_size": "4",
        "gradient_checkpointing": "false",
        "model.zero.prefetch_units": "0,2",
        "offload": "none",
    }

    space = make_space(SFTConfig(), CPU, fixed=["micro_batch_size"], given=given)

    names = [each.name for each in space.dimensions]
    assert names == [
        *("zero_stage", "offload", "gradient_checkpointing"),
        *("model.zero.prefetch_units", "micro_batch_size"),
    ]
    assert space.candidates == ((0, "none", False, 0, 4), (0, "none", False, 2, 4))


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("zero_stage", "0,7", "--autotune-space zero_stage: model.zero_stage must be one of"),
        ("micro_batch_size", "many", "--autotune-space micro_batch_size: micro_batch_size must be"),
        ("micro_batch_size", "", "--autotune-space micro_batch_size= names no values; write"),
        ("seed", "1,2", "--autotune-space seed is none of memory and speed alone; tune"),
        ("keep_last", "1,2", "--autotune-space keep_last is none of memory and speed alone"),
        ("offload", "disk", "--autotune-space offload takes none, or optimizer, gradients, params"),
        ("offload", "params", "zero.offload.params cpu needs zero_stage 3, got 0"),
    ],
)
def test_values_that_cannot_be_used_are_named(name: str, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_space(SFTConfig(), CPU, fixed=["zero_stage"], given={name: text})

    assert str(error.value).startswith(sentence)


def test_models_that_differ_may_stay_as_they_are() -> None:
    zero = ZeroConfig(offload=OffloadConfig(optimizer="cpu"))
    actor = TrainedModelConfig(path="m", zero_stage=3, zero=zero, gradient_checkpointing=True)
    config = PPOConfig(rollout_size=8, batch_size=8, actor=actor, inference_tp_size=6)

    space = make_space(config, TWO_GPUS, tp_sizes=(1, 2))

    found = {each.name: each.values for each in space.dimensions}
    for name in ("zero_stage", "offload", "gradient_checkpointing"):
        assert found[name][0] == AS_IT_IS
    assert found["inference_tp_size"] == (1, 2, 6)
    assert space.start is not None
    assert space.config(space.start) == config
    assert space.named(space.start)["zero_stage"] == AS_IT_IS
    other = space.candidate({**space.named(space.start), "zero_stage": 3})
    assert not space.needs_as_much(other, space.start)
    assert not space.needs_as_much(space.start, other)


@pytest.mark.parametrize("machine", [CPU, TWO_CPUS, GPU, TWO_GPUS])
@pytest.mark.parametrize(
    ("stage", "kinds"),
    [
        *((stage, ()) for stage in range(4)),
        *((1, kinds) for kinds in (("optimizer",), ("gradients",), ("gradients", "optimizer"))),
        (3, ("params",)),
    ],
)
def test_the_settings_as_they_are_are_always_a_candidate(
    machine: Machine, stage: Any, kinds: tuple[str, ...]
) -> None:
    zero = ZeroConfig(offload=OffloadConfig(**dict.fromkeys(kinds, "cpu")))
    model = TrainedModelConfig(path="m", zero_stage=stage, zero=zero)
    config = SFTConfig(model=model, batch_size=8, micro_batch_size=3)

    space = make_space(config, machine)

    assert space.start is not None
    assert space.config(space.start) == config


def test_values_of_one_model_take_the_place_of_those_of_all() -> None:
    space = make_space(PPOConfig(), TWO_GPUS, given={"actor.zero_stage": "0,2"})

    found = {each.name: each for each in space.dimensions}
    assert found["zero_stage"].settings == ("critic.zero_stage",)
    assert found["actor.zero_stage"].values == (0, 2)
    (only,) = (
        each
        for each in make_space(SFTConfig(), TWO_GPUS, given={"model.zero_stage": "0"}).dimensions
        if "zero_stage" in each.name
    )
    assert only.name == "model.zero_stage"
    with pytest.raises(
        ConfigError, match=r"model.zero_stage and zero_stage both say what model\.zero_stage is"
    ):
        make_space(SFTConfig(), CPU, given={"zero_stage": "0", "model.zero_stage": "0"})


def test_a_space_of_nothing_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="leaves nothing to try: one process gains nothing by"):
        make_space(SFTConfig(), CPU, given={"zero_stage": "1,2"})


def test_names_that_a_space_may_have() -> None:
    names = known_dimensions(SFTConfig())

    assert {"offload", "zero_stage", "model.zero_stage", "micro_batch_size"} <= set(names)
    assert not {"seed", "lr", "output_dir", "model.path"} & set(names)


def test_what_lies_below_on_the_ladder_with_batches_as_large_needs_as_much() -> None:
    space = make_space(SFTConfig(batch_size=8, micro_batch_size=1), TWO_GPUS)
    failed = (2, "optimizer+gradients", False, 2)

    for needs in (
        failed,
        (2, "optimizer+gradients", False, 4),
        (0, "optimizer+gradients", False, 2),
        (1, "none", False, 4),
    ):
        assert space.needs_as_much(needs, failed)
    for saves in (
        (2, "optimizer+gradients", False, 1),
        (2, "optimizer+gradients", True, 2),
        (3, "none", False, 2),
        (2, "optimizer+gradients+params", False, 2),
    ):
        assert not space.needs_as_much(saves, failed)


def test_a_setting_without_a_place_on_the_ladder_is_compared_with_none() -> None:
    given = {"model.zero.prefetch_units": "0,1", "micro_batch_size": "1,2"}
    space = make_space(SFTConfig(), CPU, given=given)

    assert space.needs_as_much((False, 1, 2), (False, 1, 1))
    assert not space.needs_as_much((False, 0, 2), (False, 1, 1))


MESH = MeshSizes(pp=(1, 2), tp=(1, 2), replicas=(1, 2))
FOUR_CPUS = Machine(4, 4, None, None)


def test_the_ways_to_divide_the_processes_are_candidates() -> None:
    config = SFTConfig(model=TrainedModelConfig(path="m"), batch_size=16, micro_batch_size=4)

    space = make_space(config, FOUR_CPUS, given={"gradient_checkpointing": "false"}, mesh=MESH)

    found = [space.named(each) for each in space.candidates]
    meshes = {
        tuple(each[f"parallel.{name}"] for name in ("pp", "tp", "replicas")) for each in found
    }
    assert meshes == {(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (2, 2, 1)}
    cut = [each["zero_stage"] for each in found if each["parallel.pp"] == each["parallel.tp"] == 2]
    assert set(cut) == {0}  # no two processes have the same part
    copies = [each["zero_stage"] for each in found if each["parallel.replicas"] == 2]
    assert set(copies) == {1, 2, 3}
    staged = [each["zero_stage"] for each in found if each["parallel.pp"] == 2]
    assert 3 not in staged  # which a pipeline refuses
    assert space.start == space.candidate(
        {
            "parallel.pp": 1,
            "parallel.tp": 1,
            "parallel.replicas": 1,
            "zero_stage": 0,
            "gradient_checkpointing": False,
            "micro_batch_size": 4,
        }
    )


def test_sizes_of_which_a_pipeline_makes_the_same_micro_batches_are_one_candidate() -> None:
    config = SFTConfig(model=TrainedModelConfig(path="m"), batch_size=16, micro_batch_size=8)
    given = {"gradient_checkpointing": "false", "zero_stage": "0", "parallel.pp": "2"}

    space = make_space(config, TWO_CPUS, given=given, mesh=MESH)

    # Of 16 rows of a pipeline 8 micro-batches are made at least, 4 for each stage.
    sizes = {each["micro_batch_size"] for each in map(space.named, space.candidates)}
    assert sorted(sizes) == [1, 2]


def test_a_mesh_with_larger_parts_needs_as_much() -> None:
    config = SFTConfig(model=TrainedModelConfig(path="m"), batch_size=16, micro_batch_size=4)
    space = make_space(config, FOUR_CPUS, given={"gradient_checkpointing": "false"}, mesh=MESH)

    def candidate(pp: int, tp: int, replicas: int, stage: int) -> Any:
        return (pp, tp, replicas, stage, False, 2)

    assert space.needs_as_much(candidate(1, 1, 1, 0), candidate(1, 2, 1, 0))
    assert space.needs_as_much(candidate(1, 1, 2, 1), candidate(1, 1, 1, 1))
    assert not space.needs_as_much(candidate(2, 1, 1, 0), candidate(1, 1, 1, 0))
    assert not space.needs_as_much(candidate(1, 1, 1, 3), candidate(1, 1, 2, 3))
