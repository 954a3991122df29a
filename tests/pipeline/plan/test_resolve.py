from pathlib import Path

import pytest

from pipeline.config import StepConfig
from pipeline.plan.request import parse_request
from pipeline.plan.resolve import EMBEDDED_PRESET, step_configs
from pipeline.settings.plain import flatten, plain
from tests.pipeline.stages import THREE_STEPS


def resolved(*argv: str, world: int = 1) -> dict[str, StepConfig]:
    return step_configs(parse_request(argv, THREE_STEPS), THREE_STEPS, world=world)


def settings(*argv: str, world: int = 1) -> dict[str, dict[str, object]]:
    return {name: flatten(plain(config)) for name, config in resolved(*argv, world=world).items()}


def test_without_options_the_embedded_model_meets_the_embedded_task() -> None:
    steps = settings()

    assert steps["step1_sft"]["model.path"] == "embedded"
    assert all(step["data.path"] == ["embedded"] for step in steps.values())


def test_each_step_takes_the_output_of_the_one_before() -> None:
    steps = settings("--output-dir", "out")

    assert steps["step1_sft"]["output_dir"] == "out/step1_sft"
    assert steps["step2_reward"]["model.path"] == "out/step1_sft"
    assert steps["step2_reward"]["actor.path"] == "out/step1_sft"
    assert steps["step3_ppo"]["actor.path"] == "out/step1_sft"
    assert steps["step3_ppo"]["critic.path"] == "out/step2_reward"
    assert steps["step3_ppo"]["reward.path"] == "out/step2_reward"
    assert steps["step3_ppo"]["reference.path"] is None


def test_a_model_of_the_users_own_meets_rm_static_unless_data_is_named() -> None:
    own = settings("--actor-model", "facebook/opt-125m", "--reward-model", "facebook/opt-350m")
    named = settings("--actor-model", "facebook/opt-125m", "--data-path", "a.jsonl", "b:2")

    assert all(step["data.path"] == ["Dahoas/rm-static"] for step in own.values())
    assert own["step2_reward"]["model.path"] == "facebook/opt-350m"
    assert all(step["data.path"] == ["a.jsonl", "b:2"] for step in named.values())


def test_shared_options_reach_all_three_steps() -> None:
    argv = ["--seed", "7", "--data-split", "1,1,2", "--format", "chatml", "--max-length", "99"]

    data = ["--eval-path", "held.csv", "--data-seed", "5"]
    for step in settings(*argv, *data, "--fields", "prompt=q").values():
        assert (step["data.eval_path"], step["data.seed"]) == (["held.csv"], 5)
        assert (step["seed"], step["data.split"]) == (7, [1.0, 1.0, 2.0])
        assert (step["data.format"], step["data.max_length"]) == ("chatml", 99)
        assert step["data.fields.prompt"] == "q"


def test_preset_then_files_then_options_then_dotted_options(tmp_path: Path) -> None:
    low, high = tmp_path / "low.yaml", tmp_path / "high.yaml"
    low.write_text("sft: {seed: 1, batch_size: 1, log_every: 1, model: {path: x/low}}")
    high.write_text("sft: {seed: 2, batch_size: 2, log_every: 2}")
    files = ["--config", str(low), "--config", str(high)]

    step = settings(*files, "--seed", "3", "--sft.log_every", "9")["step1_sft"]
    dotted = settings(*files, "--seed", "3", "--sft.seed", "4")["step1_sft"]

    assert (step["batch_size"], step["seed"], step["log_every"]) == (2, 3, 9)
    assert (dotted["seed"], step["model.path"]) == (4, "x/low")


def test_a_method_lies_over_the_presets_and_under_all_that_is_said(tmp_path: Path) -> None:
    mine = tmp_path / "my.yaml"
    mine.write_text("ppo: {group_size: 4}\n")

    plain_run = settings()["step3_ppo"]
    method = settings("--method", "grpo")["step3_ppo"]
    moved = settings("--method", "grpo", "--config", str(mine), "--ppo.kl_coef", "0.1")["step3_ppo"]

    assert (plain_run["kl_coef"], plain_run["ppo_epochs"]) == (0.2, 2)  # of embedded.yaml
    assert (method["kl_coef"], method["ppo_epochs"], method["group_size"]) == (0.04, 1, 8)
    assert (method["method"], method["advantage"], method["max_steps"]) == ("grpo", "grpo", 40)
    assert (moved["kl_coef"], moved["group_size"], moved["kl_in"]) == (0.1, 4, "loss")


def test_the_embedded_preset_applies_to_the_embedded_model_alone(tmp_path: Path) -> None:
    import yaml

    preset = yaml.safe_load(EMBEDDED_PRESET.read_text())
    says = {name: flatten(preset.get(stage, {})) for name, stage in SECTIONS.items()}
    (tmp_path / "own.yaml").write_text("sft: {model: {path: a/b}}")

    embedded = settings("--data-path", "rows.jsonl")
    own = [
        settings("--actor-model", "a/b"),
        settings("--config", str(tmp_path / "own.yaml")),
        settings("--sft.model.path", "a/b"),
    ]

    for name, preset_settings in says.items():
        expected = preset_settings | {"data.path": ["rows.jsonl"]}
        assert expected.items() <= embedded[name].items()
    assert own[0] == own[1] == own[2]
    assert own[0]["step1_sft"]["data.path"] == ["Dahoas/rm-static"]


SECTIONS = {stage.name: stage.section for stage in THREE_STEPS}


def test_handed_over_models_can_be_overridden() -> None:
    steps = settings("--ppo.actor.path", "my/actor", "--ppo.reward.path", "my/reward")

    assert steps["step3_ppo"]["actor.path"] == "my/actor"
    assert steps["step3_ppo"]["reward.path"] == "my/reward"
    assert steps["step3_ppo"]["critic.path"] == "output/step2_reward"


def stages(steps: dict[str, dict[str, object]]) -> tuple[object, ...]:
    """ZeRO stages of the four models that train."""
    return (
        steps["step1_sft"]["model.zero_stage"],
        steps["step2_reward"]["model.zero_stage"],
        steps["step3_ppo"]["actor.zero_stage"],
        steps["step3_ppo"]["critic.zero_stage"],
    )


@pytest.mark.parametrize("stage", range(4))
def test_each_models_zero_stage_holds_in_both_steps_that_train_it(stage: int) -> None:
    assert stages(settings("--actor-zero-stage", str(stage))) == (stage, 0, stage, 0)
    assert stages(settings("--reward-zero-stage", str(stage))) == (0, stage, 0, stage)


def deepspeed_file(directory: Path) -> str:
    file = directory / "ds_config.json"
    file.write_text(
        """{
            "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, // 16 on 2
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
            "steps_per_print": 10,
        }"""
    )
    return str(file)


def test_a_deepspeed_file_wins_over_files_and_loses_to_options(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "sft: {batch_size: 7, epochs: 3, model: {zero_stage: 1, optim: {weight_decay: 0.3}}}"
    )
    argv = ["--config", str(own), "--zero-config", deepspeed_file(tmp_path)]

    below = settings(*argv)
    above = settings(
        *argv, "--actor-zero-stage", "3", "--ppo.actor.zero_stage", "0", "--sft.batch_size", "5"
    )

    sft = below["step1_sft"]
    assert (sft["batch_size"], sft["model.zero_stage"], sft["epochs"]) == (8, 2, 3.0)
    assert sft["model.optim.weight_decay"] == 0.1
    assert stages(above) == (3, 2, 0, 2)
    assert (above["step1_sft"]["batch_size"], above["step1_sft"]["micro_batch_size"]) == (5, 4)
