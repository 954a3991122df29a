"""The plan estimates memory and time, refuses what can't fit, and chooses on request."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.budget.fit import find_shortage
from pipeline.config import TrainedModelConfig
from pipeline.data.sharing.steps import StageData
from pipeline.plan.checks import Preview
from pipeline.plan.describe import describe_plan, estimate, refusals
from pipeline.plan.plan import Plan, make_plan
from pipeline.run.orchestrator import main
from pipeline.system.errors import ConfigError
from step1_sft.config import SFTConfig
from tests.pipeline.stages import TOY_STAGES

OPT = "facebook/opt-1.3b"


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def plan(tmp_path: Path, words: str) -> Plan:
    return make_plan(["--output-dir", str(tmp_path / "out"), *words.split()], TOY_STAGES)


def test_a_plan_for_other_machines_has_their_processes(tmp_path: Path) -> None:
    one, eight, two = (
        plan(tmp_path, f"--step 1 --plan-for {text}")
        for text in ("1xA100-80GB", "8xA100-80GB", "2x8xA100-80GB")
    )

    assert [each.where.processes for each in (one, eight, two)] == [None, 8, 16]
    assert len(two.where.hosts) == 2
    assert "--nnodes 2" in describe_plan(two)


def test_the_prompt_of_a_group_counts_once(tmp_path: Path) -> None:
    def seconds(group: int, tokens: float) -> Any:
        words = f"--step 3 --method grpo --reward math --actor-model {OPT} --ppo.group_size {group}"
        made = plan(tmp_path, f"{words} --ppo.max_steps 1")
        preview = Preview(StageData([], [], []), row_tokens=tokens)
        return estimate(made, made.stages[0], preview, flops=1e12)

    two, sixteen = (seconds(group, 1000.0) - seconds(group, 0.0) for group in (2, 16))
    assert two == pytest.approx(8 * sixteen)


def test_what_cant_fit_is_refused_with_the_cheapest_change_that_does(tmp_path: Path) -> None:
    words = f"--step 1 --actor-model {OPT} --plan-for 1xT4-16GB"

    (sentence,) = refusals(plan(tmp_path, words))

    assert sentence.startswith("step 1 takes ")
    assert " GiB on each GPU to train, with 16.0 GiB available; it fits with --sft." in sentence
    change = sentence.partition("it fits with ")[2]
    assert list(refusals(plan(tmp_path, f"{words} {change}"))) == []


@pytest.mark.jobs
def test_a_start_that_cant_fit_ends_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--output-dir", str(tmp_path / "out"), "--actor-model", "facebook/opt-66b"]
    words += ["--step", "1", "--sft.model.precision", "fp32", "--sft.micro_batch_size", "1"]
    words += ["--sft.model.gradient_checkpointing", "true"]

    with pytest.raises(ConfigError, match=r"^step 1 takes [\d.]+ GiB on each machine to"):
        main(words, TOY_STAGES)
    assert not (tmp_path / "out").exists()

    main([*words, "--plan", "off", "--dry-run"], TOY_STAGES)
    assert "refused" not in capsys.readouterr().out


@pytest.mark.jobs
def test_auto_takes_the_fastest_rung_with_room(tmp_path: Path) -> None:
    def chosen(machine: str) -> tuple[TrainedModelConfig, int]:
        words = f"--step 1 --actor-model {OPT} --plan auto --plan-for {machine}"
        config = plan(tmp_path, words).configs["step1_sft"]
        assert isinstance(config, SFTConfig)
        return config.model, config.micro_batch_size

    large, rows = chosen("1xH200-141GB")
    small, fewer = chosen("1xT4-16GB+64GB")
    many, _ = chosen("8xT4-16GB+512GB")

    assert (large.gradient_checkpointing, large.zero.offload.optimizer, rows) == (False, "none", 32)
    assert small.zero.offload.optimizer == "cpu"
    assert fewer >= 1
    assert (many.zero_stage, many.zero.offload.optimizer) == (2, "none")


@pytest.mark.jobs
@pytest.mark.parametrize("words", ["", f"--step 1 --actor-model {OPT}"])
def test_what_auto_chose_fits_and_is_written_as_a_file(tmp_path: Path, words: str) -> None:
    automatic = plan(tmp_path, f"{words} --plan auto --plan-for 1xRTX3090-24GB+256GB")

    said = describe_plan(automatic)

    for stage in automatic.stages:
        assert find_shortage(automatic.memory(stage), automatic.machine) is None
    text = said.partition("as a file for --config:\n")[2].partition("\n\n")[0]
    file = tmp_path / "chosen.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(text)))
    again = plan(tmp_path, f"{words} --config {file} --plan-for 1xRTX3090-24GB+256GB")
    assert again.configs == automatic.configs
