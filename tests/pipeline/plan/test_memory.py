"""The plan estimates memory and time, rejects steps that can't fit, and selects settings."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.budget.fit import find_shortage
from pipeline.config import TrainedModelConfig
from pipeline.data.sharing.steps import StepData
from pipeline.models.hf.known import KNOWN_CONFIGS
from pipeline.plan.checks import Preview
from pipeline.plan.describe import describe_plan, estimate, memory_errors
from pipeline.plan.plan import Plan, make_plan
from pipeline.run.orchestrator import main
from pipeline.system.errors import ConfigError
from step1_sft.config import SFTConfig
from tests.families import HUGE
from tests.pipeline.stages import TOY_STAGES

OPT = "facebook/opt-1.3b"


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def plan(tmp_path: Path, options: str) -> Plan:
    return make_plan(["--output-dir", str(tmp_path / "out"), *options.split()], TOY_STAGES)


def test_plan_for_other_machines_has_their_processes(tmp_path: Path) -> None:
    one, eight, two = (
        plan(tmp_path, f"--step 1 --plan-for {text}")
        for text in ("1xA100-80GB", "8xA100-80GB", "2x8xA100-80GB")
    )

    assert [x.layout.processes for x in (one, eight, two)] == [None, 8, 16]
    assert len(two.layout.hosts) == 2
    assert "--nnodes 2" in describe_plan(two)


def test_prompt_of_a_group_counts_once(tmp_path: Path) -> None:
    def seconds(group: int, tokens: float) -> Any:
        argv = f"--step 3 --method grpo --reward math --actor-model {OPT} --ppo.group_size {group}"
        group_plan = plan(tmp_path, f"{argv} --ppo.max_steps 1")
        preview = Preview(StepData([], [], []), row_tokens=tokens)
        return estimate(group_plan, group_plan.stages[0], preview, flops=1e12)

    two, sixteen = (seconds(group, 1000.0) - seconds(group, 0.0) for group in (2, 16))
    assert two == pytest.approx(8 * sixteen)


def test_step_that_cant_fit_is_refused_with_a_change_that_fits(tmp_path: Path) -> None:
    argv = f"--step 1 --actor-model {OPT} --plan-for 1xT4-16GB"

    (message,) = memory_errors(plan(tmp_path, argv))

    assert message.startswith("step 1 needs ")
    assert " on each GPU to train, but only 16.0 GiB is available; it fits with --sft." in message
    change = message.partition("it fits with ")[2]
    assert list(memory_errors(plan(tmp_path, f"{argv} {change}"))) == []


@pytest.mark.jobs
def test_run_that_cant_fit_raises_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KNOWN_CONFIGS, "huge", HUGE)
    argv = ["--output-dir", str(tmp_path / "out"), "--actor-model", "huge"]
    argv += ["--step", "1", "--sft.model.precision", "fp32", "--sft.micro_batch_size", "1"]
    argv += ["--sft.model.gradient_checkpointing", "true"]

    with pytest.raises(ConfigError, match=r"^step 1 needs [\d.]+ GiB on each machine to"):
        main(argv, TOY_STAGES)
    assert not (tmp_path / "out").exists()

    main([*argv, "--plan", "off", "--dry-run"], TOY_STAGES)
    assert "refused" not in capsys.readouterr().out


@pytest.mark.jobs
def test_auto_plan_selects_the_fastest_settings_that_fit(tmp_path: Path) -> None:
    def select(machine: str) -> tuple[TrainedModelConfig, int]:
        argv = f"--step 1 --actor-model {OPT} --plan auto --plan-for {machine}"
        config = plan(tmp_path, argv).configs["step1_sft"]
        assert isinstance(config, SFTConfig)
        return config.model, config.micro_batch_size

    large, rows = select("1xH200-141GB")
    small, small_rows = select("1xT4-16GB+64GB")
    many, _ = select("8xT4-16GB+512GB")

    assert (large.gradient_checkpointing, large.zero.offload.optimizer, rows) == (False, "none", 32)
    assert small.zero.offload.optimizer == "cpu"
    assert small_rows >= 1
    assert (many.zero_stage, many.zero.offload.optimizer) == (2, "none")


def test_automatic_generation_batch_suits_processes_that_only_generate(tmp_path: Path) -> None:
    argv = "--step 3 --reward math --plan auto --plan-for 8xA100-80GB --ppo.rollout_size 768"
    argv += f" --actor-model {OPT} --ppo.rollout_processes 2 --ppo.max_new_tokens 64"

    config: Any = plan(tmp_path, argv).configs["step3_ppo"]

    assert config.generation_batch_size == 768 // 2


@pytest.mark.jobs
@pytest.mark.parametrize("argv", ["", f"--step 1 --actor-model {OPT}"])
def test_automatic_settings_fit_and_are_printed_as_a_file(tmp_path: Path, argv: str) -> None:
    automatic = plan(tmp_path, f"{argv} --plan auto --plan-for 1xRTX3090-24GB+256GB")

    description = describe_plan(automatic)

    for stage in automatic.stages:
        assert find_shortage(automatic.memory(stage), automatic.machine) is None
    text = description.partition("as a file for --config:\n")[2].partition("\n\n")[0]
    file = tmp_path / "chosen.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(text)))
    from_file = plan(tmp_path, f"{argv} --config {file} --plan-for 1xRTX3090-24GB+256GB")
    assert from_file.configs == automatic.configs
