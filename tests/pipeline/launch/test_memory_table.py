import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import FrozenModelConfig, LoraConfig, TrainedModelConfig
from pipeline.engine.config import OffloadConfig, ZeroConfig
from pipeline.engine.predict import IN_FLIGHT
from pipeline.launch.memory_table import Row, memory_rows
from pipeline.models.embedded import build_model, build_tokenizer
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo.config import PPOConfig
from tests.families import saved, tiny_causal_lm, tiny_classifier, tiny_config

PARAMETERS = sum(param.numel() for param in tiny_causal_lm("llama").parameters())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    tiny_config("llama").save_pretrained(directory)
    return str(directory)


def rows(config: Any, *, world: int = 1, gpus: int = 1, **origins: str) -> dict[str, Row]:
    sections = {SFTConfig: "sft", RewardConfig: "reward", PPOConfig: "ppo"}
    section = sections[type(config)]
    table = memory_rows(config, origins, section=section, world=world, gpus=gpus)
    return {row.role: row for row in table}


def sft(path: str, **model: Any) -> SFTConfig:
    return SFTConfig(model=TrainedModelConfig(path=path, **model))


@pytest.mark.parametrize(
    ("precision", "gpus", "weights", "masters"),
    [("fp32", 1, 4, 0), ("bf16", 0, 2, 4), ("auto", 0, 4, 0), ("auto", 1, 2, 4)],
)
def test_a_trained_model_holds_16_bytes_a_parameter_and_18_with_16_bit_weights(
    path: str, precision: str, gpus: int, weights: int, masters: int
) -> None:
    row = rows(sft(path, precision=precision), gpus=gpus)["model"]
    padded = row.sum("weights") // weights  # flat vectors are

    assert row.parameters == PARAMETERS
    assert padded == pytest.approx(PARAMETERS, rel=0.03)
    assert row.sum("masters") == masters * padded
    assert row.sum("gradients") == 4 * padded
    assert row.sum("moments") == 8 * padded
    assert row.on_device == (12 if masters == 0 else 14) * padded + row.sum(*IN_FLIGHT)


def test_the_processes_share_what_the_stage_says(path: str) -> None:
    def shared(stage: int) -> list[float]:
        config = sft(path, precision="bf16", zero_stage=stage)
        row, whole = (rows(config, world=world)["model"] for world in (4, 1))
        kinds = ("weights", "masters", "moments", "gradients")
        return [round(whole.sum(kind) / row.sum(kind), 1) for kind in kinds]

    assert shared(0) == [1.0, 1.0, 1.0, 4.0]  # reduced sums are shared out at every stage
    assert shared(1) == shared(2) == [1.0, 4.0, 4.0, 4.0]
    assert shared(3) == [4.0, 4.0, 4.0, 4.0]


def test_what_is_offloaded_counts_apart(path: str) -> None:
    zero = ZeroConfig(offload=OffloadConfig(optimizer="cpu", gradients="cpu"))
    config = sft(path, precision="bf16", zero_stage=2, zero=zero)

    row, on_cpu = rows(config)["model"], rows(config, gpus=0)["model"]

    assert row.places == {"masters": "cpu", "gradients": "cpu", "moments": "cpu"}
    assert row.offloaded == row.sum("masters", "gradients", "moments")
    assert row.on_device == row.sum("weights", "gradient_buffers", "gathered")
    # Where the model computes on the CPU, its memory is the device's.
    assert (on_cpu.places, on_cpu.offloaded) == ({}, 0)


def test_with_adapters_only_they_have_gradients_and_moments(path: str) -> None:
    whole, row = (
        rows(sft(path, precision="fp32", lora=lora))["model"] for lora in (None, LoraConfig(rank=2))
    )
    # Rank 2: q and o 2 * (32 + 32), k and v 2 * (32 + 16), three of 2 * (32 + 48), in 2 blocks;
    # 928 of a block lie in a vector of 1024.
    assert whole.parameters is not None
    assert row.parameters == whole.parameters + 2 * 928
    assert (row.sum("gradients"), row.sum("moments")) == (4 * 2 * 1024, 8 * 2 * 1024)


def test_models_that_score_have_a_head_instead_of_a_vocabulary(tmp_path: Path) -> None:
    path = saved(tiny_classifier("llama"), tmp_path / "m")
    config = RewardConfig(
        model=TrainedModelConfig(path=path), actor=FrozenModelConfig(path=path, precision="fp32")
    )

    table = rows(config)

    scorer = sum(param.numel() for param in tiny_classifier("llama").parameters())
    assert (table["model"].parameters, table["actor"].parameters) == (scorer, PARAMETERS)
    assert table["actor"].num_bytes == {"weights": 4 * PARAMETERS}


def test_the_reference_is_a_copy_of_the_actor_unless_adapters_train(path: str) -> None:
    frozen = FrozenModelConfig(path=path, precision="fp32")
    critic = TrainedModelConfig(path=path, precision="fp32")

    def table(actor: TrainedModelConfig) -> dict[str, Row]:
        return rows(PPOConfig(actor=actor, critic=critic, reward=frozen))

    whole = table(TrainedModelConfig(path=path, precision="fp32"))
    adapters = table(TrainedModelConfig(path=path, lora=LoraConfig()))

    assert whole.keys() == {"actor", "critic", "reference", "reward"}
    assert whole["reference"].num_bytes == {"weights": 4 * PARAMETERS}
    assert adapters.keys() == {"actor", "critic", "reward"}


def test_at_stage_3_frozen_models_are_sharded_as_those_they_serve(path: str) -> None:
    frozen = FrozenModelConfig(path=path, precision="fp32")

    def table(actor_stage: Any, critic_stage: Any) -> dict[str, Row]:
        actor, critic = (
            TrainedModelConfig(path=path, precision="fp32", zero_stage=stage)
            for stage in (actor_stage, critic_stage)
        )
        config = PPOConfig(actor=actor, critic=critic, reward=frozen, base=frozen)
        return rows(config, world=4)

    sharded = table(3, 2)
    assert sharded["reference"].sum("weights") == sharded["actor"].sum("weights")
    assert sharded["reference"].sum("gradients", "moments") == 0
    assert sharded["reward"].num_bytes.keys() == {"weights"}
    assert table(2, 3)["reward"].sum("weights") == table(2, 3)["critic"].sum("weights")
    assert table(2, 3)["base"].num_bytes == {"weights": 4 * PARAMETERS}
    # The actor is gathered whole to answer prompts, the reference block by block.
    assert sharded["actor"].sum("gathered") == 4 * sharded["actor"].sum("weights")
    assert 0 < sharded["reference"].sum("gathered") <= sharded["actor"].sum("gathered")


def test_a_model_yet_to_be_made_has_the_size_of_the_one_it_starts_from(path: str) -> None:
    row = rows(sft("step1"), step1=path)["model"]

    assert (row.path, row.parameters) == ("step1", PARAMETERS)


def test_a_model_on_the_hub_is_unknown_until_it_is_downloaded() -> None:
    row = rows(sft("someone/never-downloaded"))["model"]

    assert (row.parameters, row.on_device) == (None, 0)


def test_the_embedded_model_is_counted_exactly() -> None:
    model = build_model(vocab_size=len(build_tokenizer()), seed=1)

    assert rows(sft("embedded"))["model"].parameters == model.num_parameters()


def test_a_config_of_no_known_model_gives_no_number(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "strange"}))

    assert rows(sft(str(tmp_path)))["model"].parameters is None
