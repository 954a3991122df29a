from pathlib import Path
from typing import Any

import pytest

from pipeline.config import StepConfig
from pipeline.plan.request import OPT_SIZES, parse_request
from pipeline.plan.resolve import step_configs
from pipeline.plan.stage import split_methods
from pipeline.system.errors import ConfigError
from tests.pipeline.stages import THREE_STEPS


def configs(*argv: str) -> dict[str, Any]:
    command_line = parse_request(argv, THREE_STEPS)
    stages = split_methods(THREE_STEPS, command_line.request.method)
    resolved: dict[str, StepConfig] = step_configs(command_line, stages)
    return dict(zip(("sft", "reward", "ppo"), resolved.values(), strict=True))


def test_batch_size_sets_ppo_minibatch_and_minimum_rollout_size() -> None:
    small, large = configs("--batch-size", "16"), configs("--batch-size", "256")

    assert [config.batch_size for config in small.values()] == [16, 16, 16]
    assert [config.batch_size for config in large.values()] == [256, 256, 256]
    assert (small["ppo"].rollout_size, large["ppo"].rollout_size) == (128, 256)
    with pytest.raises(ConfigError, match=r"^ppo\.batch_size 256 is larger than ppo\.rollout_size"):
        configs("--batch-size", "256", "--ppo.rollout_size", "128")


def test_tensor_parallel_applies_to_training_and_generation() -> None:
    steps = configs("--tensor-parallel", "2", "--ppo.inference_tp_size", "1", "--replicas", "3")

    assert [config.parallel.tp for config in steps.values()] == [2, 2, 2]
    assert [config.parallel.replicas for config in steps.values()] == [3, 3, 3]
    assert steps["ppo"].inference_tp_size == 1  # the setting of a step is more specific
    assert configs("--tensor-parallel", "2")["ppo"].inference_tp_size == 2
    episodes = configs("--tensor-parallel", "2", "--environment", "calculator", "--method", "grpo")
    assert episodes["ppo"].inference_tp_size == 1  # each process runs its own episodes
    with pytest.raises(ConfigError, match="--tensor-parallel must be positive, got 0"):
        configs("--tensor-parallel", "0")


def test_lr_sets_the_adapter_rate_if_adapters_are_trained() -> None:
    steps = configs("--lora", "4", "--lr", "2e-4", "--reward.model.lora.lr", "5e-4")
    preset, dotted = configs("--lora", "4"), configs("--lr", "2e-4", "--sft.model.lora.rank", "4")

    assert steps["sft"].model.peak_lr == steps["ppo"].actor.peak_lr == ("lora.lr", 2e-4)
    assert steps["reward"].model.peak_lr == ("lora.lr", 5e-4)
    critic_lr = ("lora.lr", pytest.approx(1e-2))
    assert steps["ppo"].critic.peak_lr == preset["ppo"].critic.peak_lr == critic_lr
    assert preset["sft"].model.peak_lr == ("lora.lr", pytest.approx(3e-2))  # 10 times the preset's
    assert dotted["sft"].model.peak_lr == ("lora.lr", 2e-4)
    assert dotted["reward"].model.peak_lr == ("optim.lr", 2e-4)


def test_quantize_applies_to_every_model_with_adapters() -> None:
    steps = configs("--lora", "4", "--quantize", "nf4", "--ppo.critic.quantize", "int8")
    models = (steps["sft"].model, steps["reward"].model, steps["ppo"].actor, steps["ppo"].critic)

    assert [model.quantize for model in models] == ["nf4", "nf4", "nf4", "int8"]
    with pytest.raises(ConfigError, match=r"sft.model.quantize nf4 .* add adapters"):
        configs("--quantize", "nf4")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--lr 0", "--lr must be positive, got 0.0"),
        ("--lora", "--lora takes one value, got none"),
        ("--lora-variant rslora", "--lora-variant rslora needs adapters, but --lora is not set"),
        ("--data-split -1,4,4", "--data-split needs three proportions of 0 or more that are not"),
    ],
)
def test_invalid_short_form_raises_with_the_given_option(argv: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_request(argv.split(), THREE_STEPS)

    assert str(error.value).startswith(message)


def test_deepspeed_chat_sizes_are_opt_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for size in OPT_SIZES:
        request = parse_request(
            ["--actor-model", size, "--reward-model", size], THREE_STEPS
        ).request
        assert (request.actor_model, request.reward_model) == (f"facebook/opt-{size}",) * 2

    steps = configs("--actor-model", "1.3B", "--reward-model", "350m")
    assert steps["sft"].model.path == steps["ppo"].base.path == "facebook/opt-1.3b"
    assert steps["reward"].model.path == "facebook/opt-350m"
