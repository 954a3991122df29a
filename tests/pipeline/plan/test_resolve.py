from pathlib import Path

from pipeline.plan.request import parse_request
from pipeline.plan.resolve import step_configs
from pipeline.settings.fields import flatten, to_plain
from tests.pipeline.stages import THREE_STEPS


def settings(*argv: str) -> dict[str, dict[str, object]]:
    configs = step_configs(parse_request(argv, THREE_STEPS), THREE_STEPS)
    return {name: flatten(to_plain(config)) for name, config in configs.items()}


def test_each_step_starts_from_the_output_of_the_previous_one() -> None:
    steps = settings("--output-dir", "out")

    assert steps["step1_sft"]["output_dir"] == "out/step1_sft"
    assert steps["step2_reward"]["model.path"] == "out/step1_sft"
    assert steps["step3_ppo"]["actor.path"] == "out/step1_sft"
    assert steps["step3_ppo"]["critic.path"] == "out/step2_reward"
    assert steps["step3_ppo"]["reward.path"] == "out/step2_reward"
    assert steps["step3_ppo"]["reference.path"] is None


def test_other_models_use_rm_static_unless_data_is_given() -> None:
    default = settings("--actor-model", "facebook/opt-125m", "--reward-model", "facebook/opt-350m")
    with_data = settings("--actor-model", "facebook/opt-125m", "--data-path", "a.jsonl", "b:2")

    assert all(step["data.path"] == ["Dahoas/rm-static"] for step in default.values())
    assert default["step2_reward"]["model.path"] == "facebook/opt-350m"
    assert all(step["data.path"] == ["a.jsonl", "b:2"] for step in with_data.values())


def test_method_overrides_presets_and_is_overridden_by_settings(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("sft:\nppo: {group_size: 4}\n")

    default = settings()["step3_ppo"]
    argv = ("--method", "grpo_2024")
    method = settings(*argv)["step3_ppo"]
    changed = settings(*argv, "--config", str(file), "--ppo.kl_coef", "0.1")["step3_ppo"]

    assert (default["kl_coef"], default["ppo_epochs"]) == (0.1, 2)  # from embedded.yaml
    assert (method["kl_coef"], method["ppo_epochs"], method["group_size"]) == (0.04, 1, 8)
    assert (method["method"], method["advantage"], method["max_steps"]) == ("grpo_2024", "grpo", 24)
    assert (changed["kl_coef"], changed["group_size"], changed["kl_in"]) == (0.1, 4, "loss")


def write_deepspeed_file(directory: Path) -> str:
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


def test_deepspeed_file_overrides_files_and_not_options(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(
        "sft: {batch_size: 7, epochs: 3, model: {zero_stage: 1, optim: {weight_decay: 0.3}}}"
    )
    argv = ["--config", str(file), "--zero-config", write_deepspeed_file(tmp_path)]

    without_options = settings(*argv)
    with_options = settings(
        *argv, "--actor-zero-stage", "3", "--ppo.actor.zero_stage", "0", "--sft.batch_size", "5"
    )

    sft = without_options["step1_sft"]
    assert (sft["batch_size"], sft["model.zero_stage"], sft["epochs"]) == (8, 2, 3.0)
    assert sft["model.optim.weight_decay"] == 0.1
    assert (
        with_options["step1_sft"]["model.zero_stage"],
        with_options["step2_reward"]["model.zero_stage"],
        with_options["step3_ppo"]["actor.zero_stage"],
        with_options["step3_ppo"]["critic.zero_stage"],
    ) == (3, 2, 0, 2)
    sft = with_options["step1_sft"]
    assert (sft["batch_size"], sft["micro_batch_size"]) == (5, 4)
