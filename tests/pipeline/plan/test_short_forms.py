from pathlib import Path
from typing import Any

import pytest

from pipeline.config import StepConfig
from pipeline.plan.request import OPT_SIZES, parse_request
from pipeline.plan.resolve import step_configs
from pipeline.plan.stage import side_by_side
from pipeline.system.errors import ConfigError
from tests.pipeline.stages import THREE_STEPS


def configs(*argv: str) -> dict[str, Any]:
    command_line = parse_request(argv, THREE_STEPS)
    stages = side_by_side(THREE_STEPS, command_line.request.method)
    resolved: dict[str, StepConfig] = step_configs(command_line, stages)
    return dict(zip(("sft", "reward", "ppo"), resolved.values(), strict=True))


def test_batch_size_is_the_minibatch_of_ppo_and_raises_the_rollout_where_that_is_smaller() -> None:
    small, large = configs("--batch-size", "16"), configs("--batch-size", "256")

    assert [config.batch_size for config in small.values()] == [16, 16, 16]
    assert [config.batch_size for config in large.values()] == [256, 256, 256]
    assert (small["ppo"].rollout_size, large["ppo"].rollout_size) == (128, 256)
    with pytest.raises(ConfigError, match=r"^ppo\.batch_size 256 is larger than ppo\.rollout_size"):
        configs("--batch-size", "256", "--ppo.rollout_size", "128")


def test_tensor_parallel_divides_every_model_and_has_them_generate_together() -> None:
    given = configs("--tensor-parallel", "2", "--ppo.inference_tp_size", "1", "--replicas", "3")

    assert [config.parallel.tp for config in given.values()] == [2, 2, 2]
    assert [config.parallel.replicas for config in given.values()] == [3, 3, 3]
    assert given["ppo"].inference_tp_size == 1  # a step's own setting is the more specific
    assert configs("--tensor-parallel", "2")["ppo"].inference_tp_size == 2
    game = configs("--tensor-parallel", "2", "--environment", "calculator", "--method", "grpo")
    assert game["ppo"].inference_tp_size == 1  # each process plays by itself
    with pytest.raises(ConfigError, match="--tensor-parallel must be above 0, got 0"):
        configs("--tensor-parallel", "0")


def test_lr_is_the_rate_of_adapters_where_these_train() -> None:
    given = configs("--lora", "4", "--lr", "2e-4", "--reward.model.lora.lr", "5e-4")
    usual, dotted = configs("--lora", "4"), configs("--lr", "2e-4", "--sft.model.lora.rank", "4")

    assert given["sft"].model.peak_lr == given["ppo"].actor.peak_lr == ("lora.lr", 2e-4)
    assert given["reward"].model.peak_lr == ("lora.lr", 5e-4)
    critic_lr = ("lora.lr", pytest.approx(1e-2))
    assert given["ppo"].critic.peak_lr == usual["ppo"].critic.peak_lr == critic_lr
    assert usual["sft"].model.peak_lr == ("lora.lr", pytest.approx(3e-2))  # 10 times the preset's
    assert dotted["sft"].model.peak_lr == ("lora.lr", 2e-4)
    assert dotted["reward"].model.peak_lr == ("optim.lr", 2e-4)


def test_quantize_stores_the_weights_under_the_adapters_of_every_model_that_learns() -> None:
    given = configs("--lora", "4", "--quantize", "nf4", "--ppo.critic.quantize", "int8")
    models = (given["sft"].model, given["reward"].model, given["ppo"].actor, given["ppo"].critic)

    assert [model.quantize for model in models] == ["nf4", "nf4", "nf4", "int8"]
    with pytest.raises(ConfigError, match=r"sft.model.quantize nf4 .* add adapters"):
        configs("--quantize", "nf4")


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--lr 0", "--lr must be above 0, got 0.0"),
        ("--lora", "--lora takes one value, got none"),
        ("--lora-variant rslora", "--lora-variant rslora needs adapters, but --lora is not set"),
        ("--data-split -1,4,4", "--data-split needs three proportions of 0 or more that are not"),
    ],
)
def test_a_short_form_that_cant_be_is_named_as_it_was_typed(argv: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_request(argv.split(), THREE_STEPS)

    assert str(error.value).startswith(sentence)


def test_the_sizes_of_deepspeed_chat_are_models_of_opt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for size in OPT_SIZES:
        request = parse_request(
            ["--actor-model", size, "--reward-model", size], THREE_STEPS
        ).request
        assert (request.actor_model, request.reward_model) == (f"facebook/opt-{size}",) * 2

    given = configs("--actor-model", "1.3B", "--reward-model", "350m")
    assert given["sft"].model.path == given["ppo"].base.path == "facebook/opt-1.3b"
    assert given["reward"].model.path == "facebook/opt-350m"
