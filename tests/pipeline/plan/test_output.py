import json
from pathlib import Path

import pytest

from pipeline.cli import write_config
from pipeline.errors import ConfigError
from pipeline.plan.output import (
    add_to_summary,
    clear_step,
    discard_empty_step,
    finished_steps,
    only_job,
    read_summary,
)
from pipeline.plan.request import parse_request
from pipeline.plan.resolve import step_configs
from tests.pipeline.stages import THREE_STEPS


def finished(out: Path, *argv: str) -> set[str]:
    parsed = parse_request(["--output-dir", str(out), *argv], THREE_STEPS)
    return finished_steps(parsed.request, THREE_STEPS, step_configs(parsed, THREE_STEPS))


def complaint(out: Path, *argv: str) -> str:
    with pytest.raises(ConfigError) as error:
        finished(out, *argv)
    return str(error.value)


def run_step(out: Path, number: int, *argv: str, done: bool = True) -> Path:
    """What a step leaves: settings, a metrics file and, where it is done, a result."""
    parsed = parse_request(["--output-dir", str(out), *argv], THREE_STEPS)
    name = THREE_STEPS[number - 1].name
    write_config(step_configs(parsed, THREE_STEPS)[name], out / name / "config.yaml")
    (out / name / "metrics.jsonl").write_text("{}\n")
    if done:
        (out / name / "result.json").write_text('{"seconds": 2.5}')
    return out / name


def test_files_that_are_not_ours_are_refused_until_told_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")

    assert "holds files that are not of a run (thesis.tex)" in complaint(tmp_path)
    assert finished(tmp_path, "--overwrite") == finished(tmp_path, "--resume") == set()


def test_a_step_directory_that_is_not_ours_is_refused_whatever_is_said(tmp_path: Path) -> None:
    (tmp_path / "step1_sft").mkdir()
    (tmp_path / "step1_sft" / "weights").write_text("mine")

    for option in ([], ["--resume"], ["--overwrite"]):
        assert "it has no config.yaml" in complaint(tmp_path, *option)


def test_a_finished_step_is_not_run_again_unasked(tmp_path: Path) -> None:
    directory = run_step(tmp_path, 1)

    assert complaint(tmp_path, "--step", "1") == (
        f"step 1 in {directory} is finished; --resume skips it, --overwrite replaces it"
    )
    assert finished(tmp_path, "--resume") == {"step1_sft"}
    assert finished(tmp_path, "--overwrite") == set()


def test_an_unfinished_step_begins_again_with_resume(tmp_path: Path) -> None:
    run_step(tmp_path, 1)
    directory = run_step(tmp_path, 2, done=False)

    assert complaint(tmp_path, "--step", "2").startswith(
        f"step 2 in {directory} is not finished; --resume starts it again"
    )
    assert finished(tmp_path, "--resume") == {"step1_sft"}


def test_steps_after_one_that_must_run_are_not_skipped(tmp_path: Path) -> None:
    run_step(tmp_path, 1, done=False)
    run_step(tmp_path, 2)

    assert finished(tmp_path, "--resume") == set()


def test_resume_names_the_first_setting_that_differs(tmp_path: Path) -> None:
    directory = run_step(tmp_path, 1)

    assert complaint(tmp_path, "--resume", "--sft.model.optim.eps", "0.5") == (
        f"step 1 in {directory} was finished with sft.model.optim.eps 1e-08 where this run has 0.5;"
        " keep that setting, choose another --output-dir, or pass --overwrite"
    )
    assert "with sft.model.lora.alpha null where this run has 32.0;" in complaint(
        tmp_path, "--resume", "--sft.model.lora.rank", "8"
    )


def test_a_finished_step_goes_on_where_its_learning_rates_have_no_end(tmp_path: Path) -> None:
    endless = ("--sft.model.optim.schedule", "constant", "--sft.model.optim.warmup_steps", "3")
    run_step(tmp_path, 1, "--sft.max_steps", "20", *endless)
    more = ("--step", "1", "--resume", "--sft.max_steps")

    assert finished(tmp_path, *more, "30", *endless) == set()
    assert finished(tmp_path, *more, "20", *endless) == {"step1_sft"}
    assert "was finished with sft.max_steps 20 where this run has 10;" in complaint(
        tmp_path, *more, "10", *endless
    )


def test_another_run_is_refused_by_its_shared_settings(tmp_path: Path) -> None:
    run_step(tmp_path, 1, "--seed", "1")

    assert "holds another run, with sft.seed 1 where this run has 2" in complaint(
        tmp_path, "--step", "2", "--seed", "2"
    )
    assert "sft.data.seed 0 where this run has 3" in complaint(
        tmp_path, "--step", "2", "--seed", "1", "--data-seed", "3"
    )
    assert "sft.model.path embedded where this run has a/b" in complaint(
        tmp_path, "--step", "2", "--seed", "1", "--actor-model", "a/b", "--data-path", "embedded"
    )
    assert finished(tmp_path, "--step", "2", "--seed", "1", "--sft.max_steps", "3") == set()


def test_a_run_that_was_moved_is_the_same_run(tmp_path: Path) -> None:
    run_step(tmp_path / "old", 1)
    run_step(tmp_path / "old", 2)
    (tmp_path / "old").rename(tmp_path / "new")

    assert finished(tmp_path / "new", "--resume") == {"step1_sft", "step2_reward"}


def test_clearing_a_step_removes_what_it_left_and_nothing_else(tmp_path: Path) -> None:
    directory = run_step(tmp_path, 1)
    add_to_summary(tmp_path, "step1_sft")
    (directory / "notes.txt").write_text("mine")
    (tmp_path / "thesis.tex").write_text("mine")

    clear_step(tmp_path, "step1_sft")

    assert [file.name for file in directory.iterdir()] == ["notes.txt"]
    assert (tmp_path / "thesis.tex").read_text() == "mine"
    assert read_summary(tmp_path) == {"steps": {}, "seconds": 0}


def test_clearing_a_step_that_was_cut_off_removes_what_steps_make(tmp_path: Path) -> None:
    directory = run_step(tmp_path, 1, done=False)
    (directory / "actor").mkdir()
    (directory / "actor/model.safetensors").write_text("weights")

    clear_step(tmp_path, "step1_sft")

    assert not directory.exists()


def test_a_step_that_made_nothing_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "step1_sft").mkdir(parents=True)
    (out / "step1_sft" / "config.yaml").write_text("seed: 1")
    (out / "step1_sft" / "metrics.jsonl").write_text("")

    with only_job(out):
        discard_empty_step(out, "step1_sft")

    assert not out.exists()


def test_a_second_job_is_kept_out(tmp_path: Path) -> None:
    with (
        only_job(tmp_path),
        pytest.raises(ConfigError, match="is in use by process"),
        only_job(tmp_path),
    ):
        pass


def test_the_summary_holds_each_finished_step_and_the_sum_of_seconds(tmp_path: Path) -> None:
    run_step(tmp_path, 2)
    add_to_summary(tmp_path, "step2_reward")
    run_step(tmp_path, 1)
    add_to_summary(tmp_path, "step1_sft")

    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "steps": {"step1_sft": {"seconds": 2.5}, "step2_reward": {"seconds": 2.5}},
        "seconds": 5.0,
    }
