import json
from pathlib import Path

import pytest

from pipeline.cli import write_config
from pipeline.errors import ConfigError
from pipeline.plan.output import (
    add_to_summary,
    clear_step,
    finished_steps,
    only_job,
    read_summary,
    record_step,
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
    record_step(out, name)
    return out / name


def test_a_new_or_empty_directory_is_free(tmp_path: Path) -> None:
    assert finished(tmp_path) == set()
    assert finished(tmp_path / "new") == set()


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--sft.data.fields.prompt", "q", "--sft.data.fields.chosen", "a"),
        ("--sft.data.template_args.enable_thinking", "false"),
        ("--sft.model.lora.rank", "4"),
    ],
)
def test_a_finished_step_is_the_same_run_whatever_shape_its_settings_have(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    run_step(tmp_path, 1, *options)

    assert finished(tmp_path, "--resume", *options) == {"step1_sft"}


def test_a_setting_that_did_not_exist_then_had_the_effect_of_its_default(tmp_path: Path) -> None:
    recorded = run_step(tmp_path, 1) / "config.yaml"
    older = [line for line in recorded.read_text().splitlines() if "keep_best" not in line]
    recorded.write_text("\n".join(older))

    assert finished(tmp_path, "--resume") == {"step1_sft"}
    assert "sft.keep_best True where this run has False" in complaint(
        tmp_path, "--resume", "--sft.keep_best", "false"
    )


def test_so_had_one_of_an_optional_section(tmp_path: Path) -> None:
    adapters = ("--sft.model.lora.rank", "4")
    recorded = run_step(tmp_path, 1, *adapters) / "config.yaml"
    older = [line for line in recorded.read_text().splitlines() if "variant:" not in line]
    recorded.write_text("\n".join(older))

    assert finished(tmp_path, "--resume", *adapters) == {"step1_sft"}
    assert "sft.model.lora.variant lora where this run has rslora" in complaint(
        tmp_path, "--resume", *adapters, "--sft.model.lora.variant", "rslora"
    )


def test_a_file_is_no_output_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert complaint(tmp_path / "file").endswith("is a file, not a directory")


def test_files_that_are_not_ours_are_refused_until_told_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")

    assert "holds files that are not of a run (thesis.tex)" in complaint(tmp_path)
    assert finished(tmp_path, "--overwrite") == finished(tmp_path, "--resume") == set()


def test_a_step_directory_that_is_not_ours_is_refused_whatever_is_said(tmp_path: Path) -> None:
    (tmp_path / "step1_sft").mkdir()
    (tmp_path / "step1_sft" / "weights").write_text("mine")

    for option in ([], ["--resume"], ["--overwrite"]):
        assert "it has no config.yaml" in complaint(tmp_path, *option)


def test_the_next_step_needs_no_option(tmp_path: Path) -> None:
    run_step(tmp_path, 1)

    assert finished(tmp_path, "--step", "2") == set()


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


@pytest.mark.parametrize(
    ("before", "now", "reason"),
    [
        # Of several differences the one that is in the way of the length.
        (
            ("schedule=constant", "warmup_steps=3"),
            ("schedule=constant",),
            "sft.model.optim.warmup_steps 3 where this run has null;",
        ),
        (
            ("schedule=constant",),
            ("schedule=constant",),
            "sft.max_steps 20 where this run has 30, and sft.model.optim.warmup_steps is null, so"
            " that the warm-up is a share of all steps (warmup_ratio 0.03);",
        ),
        (
            (),
            ("warmup_steps=0",),
            "sft.model.optim.warmup_steps null where this run has 0;",
        ),
        (
            ("warmup_steps=2000",),
            ("warmup_steps=2000",),
            "sft.max_steps 20 where this run has 30, and sft.model.optim.schedule cosine ends with"
            " the run;",
        ),
    ],
)
def test_a_refusal_to_make_a_step_longer_names_the_setting_in_the_way(
    before: tuple[str, ...], now: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    directory = run_step(tmp_path, 1, "--sft.max_steps", "20", *optim_options(before))

    assert complaint(
        tmp_path, "--step", "1", "--resume", "--sft.max_steps", "30", *optim_options(now)
    ) == (
        f"step 1 in {directory} was finished with {reason} keep that setting, choose another"
        " --output-dir, or pass --overwrite"
    )


def optim_options(settings: tuple[str, ...]) -> list[str]:
    return [f"--sft.model.optim.{setting}" for setting in settings]


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
    (tmp_path / "run.json").unlink()

    clear_step(tmp_path, "step1_sft")

    assert not directory.exists()


def test_clearing_a_step_that_was_cut_off_leaves_what_no_step_makes(tmp_path: Path) -> None:
    directory = run_step(tmp_path, 1, done=False)
    (directory / "notes.txt").write_text("mine")
    (tmp_path / "run.json").unlink()

    clear_step(tmp_path, "step1_sft")

    assert [file.name for file in directory.iterdir()] == ["notes.txt"]


def test_a_file_that_stayed_through_one_clearing_stays_through_the_next(tmp_path: Path) -> None:
    directory = run_step(tmp_path, 1)
    (directory / "notes.txt").write_text("mine")

    others = clear_step(tmp_path, "step1_sft")
    run_step(tmp_path, 1)
    record_step(tmp_path, "step1_sft", others=others)
    clear_step(tmp_path, "step1_sft")

    assert others == {"notes.txt"}
    assert [file.name for file in directory.iterdir()] == ["notes.txt"]


def test_clearing_touches_no_directory_without_our_mark(tmp_path: Path) -> None:
    (tmp_path / "step1_sft").mkdir()
    (tmp_path / "step1_sft" / "weights").write_text("mine")

    clear_step(tmp_path, "step1_sft")

    assert (tmp_path / "step1_sft" / "weights").read_text() == "mine"


def test_a_step_that_made_nothing_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "step1_sft").mkdir(parents=True)
    (out / "step1_sft" / "config.yaml").write_text("seed: 1")
    (out / "step1_sft" / "metrics.jsonl").write_text("")

    with only_job(out):
        record_step(out, "step1_sft")

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


def test_settings_that_cant_be_read_are_named(tmp_path: Path) -> None:
    directory = run_step(tmp_path, 1)
    (directory / "config.yaml").write_text("a: [")

    assert complaint(tmp_path, "--resume").startswith(f"{directory}/config.yaml can't be read")


def test_overwriting_removes_checkpoints_that_were_never_recorded(tmp_path: Path) -> None:
    directory = tmp_path / "step1_sft"
    run_step(tmp_path, 1)
    (directory / "checkpoints" / "step_00000002").mkdir(parents=True)
    (directory / "checkpoints" / "step_00000002" / "manifest.json").write_text("{}")

    clear_step(tmp_path, "step1_sft")

    assert not (directory / "checkpoints").exists()
