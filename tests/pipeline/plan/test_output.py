import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cli.options import write_config
from pipeline.plan.output import add_to_summary, clear_step, finished_steps, read_summary
from pipeline.plan.request import parse_request
from pipeline.plan.resolve import step_configs
from pipeline.system.errors import ConfigError
from tests.pipeline.stages import THREE_STEPS


def find_finished(out: Path, *argv: str) -> set[str]:
    parsed = parse_request(["--output-dir", str(out), *argv], THREE_STEPS)
    done = {step.number for step in THREE_STEPS if (out / step.name / "result.json").is_file()}
    parsed = replace(parsed, finished_steps=frozenset(done))
    return finished_steps(parsed.request, THREE_STEPS, step_configs(parsed, THREE_STEPS))


def get_error(out: Path, *argv: str) -> str:
    with pytest.raises(ConfigError) as error:
        find_finished(out, *argv)
    return str(error.value)


def run_step(out: Path, number: int, *argv: str, done: bool = True) -> Path:
    """Write the output of a step: settings, a metrics file and, if it is done, a result."""
    parsed = parse_request(["--output-dir", str(out), *argv], THREE_STEPS)
    name = THREE_STEPS[number - 1].name
    write_config(step_configs(parsed, THREE_STEPS)[name], out / name / "config.yaml")
    (out / name / "metrics.jsonl").write_text("{}\n")
    if done:
        (out / name / "result.json").write_text('{"seconds": 2.5}')
    return out / name


def test_step_directory_without_config_is_never_accepted(tmp_path: Path) -> None:
    (tmp_path / "step1_sft").mkdir()
    (tmp_path / "step1_sft" / "weights").write_text("mine")

    for option in ([], ["--resume"], ["--overwrite"]):
        assert "it has no config.yaml" in get_error(tmp_path, *option)


def test_finished_step_needs_resume_or_overwrite(tmp_path: Path) -> None:
    directory = run_step(tmp_path, 1)

    assert get_error(tmp_path, "--step", "1") == (
        f"step 1 in {directory} is finished; --resume skips it, --overwrite replaces it"
    )
    assert find_finished(tmp_path, "--resume") == {"step1_sft"}
    assert find_finished(tmp_path, "--overwrite") == set()


def test_unfinished_step_restarts_with_resume(tmp_path: Path) -> None:
    run_step(tmp_path, 1)
    directory = run_step(tmp_path, 2, done=False)

    assert get_error(tmp_path, "--step", "2").startswith(
        f"step 2 in {directory} is not finished; --resume restarts it"
    )
    assert find_finished(tmp_path, "--resume") == {"step1_sft"}


def test_resume_reports_the_first_setting_that_differs(tmp_path: Path) -> None:
    directory = run_step(tmp_path, 1)

    assert get_error(tmp_path, "--resume", "--sft.model.optim.eps", "0.5") == (
        f"step 1 in {directory} was finished with sft.model.optim.eps 1e-08 where this run has 0.5;"
        " use that setting, choose another --output-dir, or pass --overwrite"
    )
    run_step(tmp_path, 3)
    assert find_finished(tmp_path, "--resume", "--step", "3", "--ppo.reuse_forward", "false")
    assert "with sft.model.lora.alpha null where this run has 32.0;" in get_error(
        tmp_path, "--resume", "--sft.model.lora.rank", "8"
    )


def test_clear_step_removes_only_files_of_the_step(tmp_path: Path) -> None:
    directory = run_step(tmp_path, 1)
    add_to_summary(tmp_path, "step1_sft")
    (directory / "notes.txt").write_text("mine")
    (directory / "backup").mkdir()
    (directory / "backup" / "model.safetensors").write_text("mine")
    (tmp_path / "thesis.tex").write_text("mine")

    clear_step(tmp_path, "step1_sft")

    assert {file.name for file in directory.iterdir()} == {"notes.txt", "backup"}
    assert (directory / "backup" / "model.safetensors").read_text() == "mine"
    assert (tmp_path / "thesis.tex").read_text() == "mine"
    assert read_summary(tmp_path) == {"steps": {}, "seconds": 0}


def test_summary_has_finished_steps_and_total_seconds(tmp_path: Path) -> None:
    run_step(tmp_path, 2)
    add_to_summary(tmp_path, "step2_reward")
    run_step(tmp_path, 1)
    add_to_summary(tmp_path, "step1_sft")

    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "steps": {"step1_sft": {"seconds": 2.5}, "step2_reward": {"seconds": 2.5}},
        "seconds": 5.0,
    }
