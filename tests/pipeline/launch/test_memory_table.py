import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
)

from pipeline.config import FrozenModelConfig, LoraConfig, TrainedModelConfig
from pipeline.launch.memory_table import memory_rows, parameter_shapes
from pipeline.models.embedded import build_model, build_tokenizer
from step1_sft.config import SFTConfig
from step3_ppo.config import PPOConfig


def tiny(directory: Path) -> str:
    """A model of 4 x 3 + 3 x 3 = 21 parameters."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    tensors = {"embed.weight": torch.zeros(4, 3), "layers.0.q_proj.weight": torch.zeros(3, 3)}
    save_file(tensors, directory / "model.safetensors")
    return str(directory)


def sft(path: str, **model: object) -> SFTConfig:
    return SFTConfig(model=TrainedModelConfig(path=path, **model))


@pytest.mark.parametrize(
    ("precision", "gpus", "weights", "masters"),
    [("fp32", 1, 84, 0), ("bf16", 0, 42, 84), ("auto", 0, 84, 0), ("auto", 1, 42, 84)],
)
def test_a_trained_model_holds_16_bytes_a_parameter_and_18_with_16_bit_weights(
    tmp_path: Path, precision: str, gpus: int, weights: int, masters: int
) -> None:
    (row,) = memory_rows(sft(tiny(tmp_path / "m"), precision=precision), {}, gpus=gpus)

    assert (row.parameters, row.weights, row.gradients) == (21, weights, 84)
    assert (row.masters, row.moments, row.total) == (masters, 168, 21 * (18 if masters else 16))


def test_with_adapters_only_they_have_gradients_and_moments(tmp_path: Path) -> None:
    # Rank 2 on the one 3 x 3 matrix: A and B have 2 * (3 + 3) = 12 parameters.
    config = sft(tiny(tmp_path / "m"), precision="fp32", lora=LoraConfig(rank=2))

    (row,) = memory_rows(config, {}, gpus=0)

    assert (row.weights, row.gradients, row.moments) == ((21 + 12) * 4, 12 * 4, 12 * 8)


def test_the_reference_is_a_copy_of_the_actor_unless_adapters_train(tmp_path: Path) -> None:
    path = tiny(tmp_path / "m")
    frozen = FrozenModelConfig(path=path, precision="fp32")
    critic = TrainedModelConfig(path=path, precision="fp32")

    def roles(actor: TrainedModelConfig) -> dict[str, int]:
        config = PPOConfig(actor=actor, critic=critic, reward=frozen)
        return {row.role: row.total for row in memory_rows(config, {}, gpus=0)}

    whole = roles(TrainedModelConfig(path=path, precision="fp32"))
    adapters = roles(TrainedModelConfig(path=path, lora=LoraConfig()))

    assert whole == {"actor": 336, "critic": 336, "reference": 84, "reward": 84}
    assert adapters.keys() == {"actor", "critic", "reward"}


def test_a_model_yet_to_be_made_has_the_size_of_the_one_it_starts_from(tmp_path: Path) -> None:
    path = tiny(tmp_path / "m")

    (row,) = memory_rows(sft("out/step1_sft"), {"out/step1_sft": path}, gpus=0)

    assert (row.path, row.parameters) == ("out/step1_sft", 21)


def test_a_model_on_the_hub_is_unknown_until_it_is_downloaded() -> None:
    (row,) = memory_rows(sft("someone/never-downloaded"), {}, gpus=0)

    assert (row.parameters, row.total) == (None, 0)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(
            vocab_size=500,
            hidden_size=64,
            intermediate_size=172,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
        Qwen2Config(
            vocab_size=500,
            hidden_size=64,
            intermediate_size=172,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        ),
        OPTConfig(
            vocab_size=500,
            hidden_size=64,
            ffn_dim=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            word_embed_proj_dim=64,
        ),
        GPT2Config(vocab_size=500, n_embd=64, n_layer=2, n_head=4, n_positions=128),
    ],
    ids=lambda config: config.model_type,
)
def test_sizes_from_a_config_are_within_three_percent_of_the_model(
    tmp_path: Path, config: PretrainedConfig
) -> None:
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config)

    shapes = parameter_shapes(str(tmp_path), {})

    assert shapes is not None
    counted = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert counted == pytest.approx(model.num_parameters(), rel=0.03)


def test_the_embedded_model_is_counted_within_three_percent() -> None:
    shapes = parameter_shapes("embedded", {})
    model = build_model(vocab_size=len(build_tokenizer()), seed=1)

    assert shapes is not None
    assert shapes["all"][0] == pytest.approx(model.num_parameters(), rel=0.03)


def test_a_config_without_sizes_gives_no_number(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "strange"}))

    assert parameter_shapes(str(tmp_path), {}) is None
