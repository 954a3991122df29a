"""A restart that must not continue is refused in one sentence, with exit code 2."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config import DataConfig, StepConfig
from tests.faults.jobs import DATA, Forked, run_forked, small
from tests.pipeline.engine.checkpoint.saving import newest


def started(start: Path, tmp_path: Path) -> StepConfig:
    """A job that was interrupted in step 3 of 4, on separate rows."""
    rows = tmp_path / DATA
    rows.write_text((start / DATA).read_text())
    data = DataConfig(path=(str(rows),), max_eval_rows=6, max_length=64)
    config = small(start, "sft", output_dir=tmp_path / "out", max_steps=4, data=data)
    assert run_forked(config, world_size=1, fault="engine.step:0:3:kill") == [-9]
    return replace(config, resume=True)


def refusal(config: StepConfig) -> str:
    """Return the message of the job, which ends with exit code 2 and keeps its output."""
    before = {path: path.stat().st_mtime_ns for path in saved_files(config)}
    with Forked(config, world_size=1) as job:
        assert job.wait() == [2], job.output()
        output = job.output()
    assert {path: path.stat().st_mtime_ns for path in saved_files(config)} == before
    assert "Traceback" not in output
    (sentence,) = [line for line in output.splitlines() if line.startswith("error: ")]
    return sentence


def last_checkpoint(config: StepConfig) -> Path:
    checkpoint, _ = newest(config.output_dir / "checkpoints")
    assert checkpoint is not None
    return checkpoint.path


def saved_files(config: StepConfig) -> list[Path]:
    out = config.output_dir
    return [out / "metrics.jsonl", *(out / "checkpoints").glob("step_*/*")]


@pytest.mark.parametrize("change", ["a word", pytest.param("rows less", marks=pytest.mark.faults)])
def test_data_that_has_changed_is_refused(change: str, start: Path, tmp_path: Path) -> None:
    config = started(start, tmp_path)
    rows = tmp_path / DATA
    lines = rows.read_text().splitlines()
    match change:
        case "a word":
            lines = [line.replace("moon", "mood") for line in lines]
        case "rows less":  # of those that the step trains on
            lines = [line for line in lines if "moon" not in line]
    rows.write_text("\n".join(lines) + "\n")

    assert refusal(config) == (
        f"error: the training rows differ from those of {last_checkpoint(config)}: the"
        " data has changed; restore it, or pass --overwrite to start over"
    )


@pytest.mark.jobs
def test_checkpoints_of_which_none_can_be_used_are_not_begun_over(
    start: Path, tmp_path: Path
) -> None:
    config = started(start, tmp_path)
    root = tmp_path / "out" / "checkpoints"
    manifests = list(root.glob("step_*/manifest.json"))
    for path in manifests:
        path.write_text("{}")

    sentence = refusal(config)

    assert sentence.startswith(
        f"error: none of the {len(manifests)} checkpoints in {root} can be used: "
    )
