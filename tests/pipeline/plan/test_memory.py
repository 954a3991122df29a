"""The plan counts before it starts, refuses what can't fit, and chooses where it is told to."""

from pathlib import Path

import pytest
import yaml

from pipeline.budget.fit import shortage
from pipeline.budget.machine import parse_machine
from pipeline.config import TrainedModelConfig
from pipeline.errors import ConfigError, ModelError
from pipeline.orchestrator import main
from pipeline.plan.describe import describe_plan
from pipeline.plan.memory import insist_on_memory, memory_of, refusals
from pipeline.plan.plan import Plan, make_plan
from step1_sft.config import SFTConfig
from step3_ppo.config import PPOConfig
from tests.pipeline.stages import TOY_STAGES


def plan(tmp_path: Path, words: str) -> Plan:
    return make_plan(["--output-dir", str(tmp_path / "out"), *words.split()], TOY_STAGES)


def test_the_embedded_model_fits_any_machine(tmp_path: Path) -> None:
    insist_on_memory(plan(tmp_path, "--plan-for 1xT4-16GB"))


def test_a_plan_for_other_machines_has_their_processes(tmp_path: Path) -> None:
    one, eight, two = (
        plan(tmp_path, f"--plan-for {text}")
        for text in ("1xA100-80GB", "8xA100-80GB", "2x8xA100-80GB")
    )

    assert [each.processes for each in (one, eight, two)] == [None, 8, 16]
    assert len(two.where.hosts) == 2
    assert "--nnodes 2" in describe_plan(two)


def test_what_cant_fit_is_refused_with_the_cheapest_change(tmp_path: Path) -> None:
    big = plan(tmp_path, "--step 1 --actor-model facebook/opt-1.3b --plan-for 1xT4-16GB")

    (sentence,) = refusals(big)

    assert sentence.startswith("step 1 takes ")
    assert " GiB on each GPU to train, and there are 15.0 GiB; it fits with --sft." in sentence
    with pytest.raises(ConfigError, match="it fits with"):
        insist_on_memory(big)


def test_the_change_that_is_named_does(tmp_path: Path) -> None:
    words = "--step 1 --actor-model facebook/opt-1.3b --plan-for 1xT4-16GB"
    (sentence,) = refusals(plan(tmp_path, words))

    changed = plan(tmp_path, f"{words} {sentence.partition('it fits with ')[2]}")

    assert list(refusals(changed)) == []


def test_a_start_that_cant_fit_ends_before_it_begins(tmp_path: Path) -> None:
    words = ["--output-dir", str(tmp_path / "out"), "--actor-model", "facebook/opt-66b"]
    words += ["--step", "1", "--sft.model.precision", "fp32"]

    with pytest.raises(ConfigError, match=r"^step 1 takes [\d.]+ GiB on each machine to"):
        main(words, TOY_STAGES)
    assert not (tmp_path / "out").exists()

    main([*words, "--plan", "off"], TOY_STAGES)
    assert (tmp_path / "out" / "step1_sft" / "result.json").is_file()


def test_each_start_says_what_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--output-dir", str(tmp_path / "out"), "--step", "1"], TOY_STAGES)

    said = capsys.readouterr().out
    assert said.startswith("memory: this machine has ")
    assert "\n  step 1 takes at most " in said


def test_a_dry_run_shows_each_phase(tmp_path: Path) -> None:
    said = describe_plan(plan(tmp_path, "--dry-run --plan-for 2xA100-80GB"))

    headers = [line.split() for line in said.splitlines() if line.startswith("  MiB")]
    assert headers == [
        ["MiB", "load", "score", "train"],
        ["MiB", "load", "score", "train", "generate"],
        ["MiB", "load", "generate", "score", "train"],
    ]
    for kind in ("weights", "moments", "activations", "kv cache", "runtime", "at most"):
        assert f"\n  {kind} " in said
    assert "2xA100-80GB has 80.0 GiB on each GPU" in said


def test_auto_takes_the_fastest_rung_with_room(tmp_path: Path) -> None:
    def chosen(machine: str) -> tuple[TrainedModelConfig, int]:
        words = f"--step 1 --actor-model facebook/opt-1.3b --plan auto --plan-for {machine}"
        config = plan(tmp_path, words).configs["step1_sft"]
        assert isinstance(config, SFTConfig)
        return config.model, config.micro_batch_size

    large, rows = chosen("1xH200-141GB")
    small, fewer = chosen("1xT4-16GB+64GB")
    many, _ = chosen("8xT4-16GB+512GB")

    assert (large.gradient_checkpointing, large.zero.offload.optimizer, rows) == (False, "none", 32)
    assert (small.zero.offload.optimizer, small.gradient_checkpointing) == ("cpu", True)
    assert fewer >= 1
    assert (many.zero_stage, many.zero.offload.optimizer) == (2, "none")


def test_what_auto_chose_fits_and_is_written_as_a_file(tmp_path: Path) -> None:
    words = "--actor-model facebook/opt-1.3b --reward-model facebook/opt-350m"
    automatic = plan(tmp_path, f"{words} --plan auto --plan-for 1xA6000-48GB+256GB")

    said = describe_plan(automatic)

    for stage in automatic.stages:
        assert shortage(memory_of(automatic, stage), automatic.machine) is None
    text = said.partition("as a file for --config:\n")[2].partition("\n\n")[0]
    file = tmp_path / "chosen.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(text)))
    again = plan(tmp_path, f"{words} --config {file} --plan-for 1xA6000-48GB+256GB")
    assert again.configs == automatic.configs


def test_the_users_own_settings_win(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("sft: {model: {gradient_checkpointing: true}}\n")

    mine = plan(
        tmp_path,
        "--step 1 --actor-model facebook/opt-1.3b --plan auto --plan-for 2xH200-141GB"
        f" --sft.micro_batch_size 3 --actor-zero-stage 3 --config {file}",
    )

    config = mine.configs["step1_sft"]
    assert isinstance(config, SFTConfig)
    assert (config.micro_batch_size, config.model.zero_stage) == (3, 3)
    assert config.model.gradient_checkpointing
    assert "micro_batch_size" not in mine.chosen["sft"]
    assert "model.zero_stage" not in mine.chosen["sft"]


def test_auto_gives_the_keys_and_values_the_room_there_is(tmp_path: Path) -> None:
    def answers(machine: str) -> int:
        words = "--step 3 --ppo.actor.path facebook/opt-1.3b --ppo.critic.path facebook/opt-125m"
        words += " --ppo.reward.path facebook/opt-125m --ppo.rollout_size 2048 --plan auto"
        words += " --actor-model facebook/opt-1.3b"
        config = plan(tmp_path, f"{words} --plan-for {machine}").configs["step3_ppo"]
        assert isinstance(config, PPOConfig)
        return config.generation_batch_size

    assert 1 <= answers("1xRTX4090-24GB+512GB") < answers("1xH200-141GB+512GB") < 2048


def test_auto_needs_to_know_the_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--plan auto can't choose for step 1: model a/b is not"):
        plan(tmp_path, "--step 1 --actor-model a/b --plan auto --plan-for 1xT4-16GB")


def test_check_and_plan_for_are_of_different_machines(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave --plan-for away"):
        plan(tmp_path, "--check --plan-for 1xT4-16GB")


def test_every_word_of_a_machine_is_a_world() -> None:
    assert parse_machine("128x8xA100-80GB").world == 1024
