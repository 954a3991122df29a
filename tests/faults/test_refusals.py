"""Restarts that must not continue are rejected with one sentence and exit code 2."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config import DataConfig, StepConfig
from tests.faults.jobs import DATA, Forked, run_forked, small_job
from tests.pipeline.engine.checkpoint.saving import newest


def interrupted_job(inputs: Path, tmp_path: Path) -> StepConfig:
    """Interrupt a job in step 3 of 4, on a copy of the rows; return its resuming config."""
    rows = tmp_path / DATA
    rows.write_text((inputs / DATA).read_text())
    data = DataConfig(path=(str(rows),), max_eval_rows=6, max_length=64)
    config = small_job(inputs, "sft", output_dir=tmp_path / "out", max_steps=4, data=data)
    assert run_forked(config, world_size=1, fault="engine.step:0:3:kill") == [-9]
    return replace(config, resume=True)


def run_rejected(config: StepConfig) -> str:
    """Run a job that exits with code 2 and keeps its output; return its message."""
    before = {path: path.stat().st_mtime_ns for path in saved_files(config)}
    with Forked(config, world_size=1) as job:
        assert job.wait() == [2], job.output()
        output = job.output()
    assert {path: path.stat().st_mtime_ns for path in saved_files(config)} == before
    assert "Traceback" not in output
    (message,) = [line for line in output.splitlines() if line.startswith("error: ")]
    return message


def saved_files(config: StepConfig) -> list[Path]:
    out = config.output_dir
    return [out / "metrics.jsonl", *(out / "checkpoints").glob("step_*/*")]


@pytest.mark.parametrize(
    "change", ["changed word", pytest.param("fewer rows", marks=pytest.mark.faults)]
)
def test_resume_with_changed_data_is_rejected(change: str, inputs: Path, tmp_path: Path) -> None:
    config = interrupted_job(inputs, tmp_path)
    rows = tmp_path / DATA
    lines = rows.read_text().splitlines()
    match change:
        case "changed word":
            lines = [line.replace("moon", "mood") for line in lines]
        case "fewer rows":  # among the training rows
            lines = [line for line in lines if "moon" not in line]
    rows.write_text("\n".join(lines) + "\n")

    root = config.output_dir / "checkpoints"
    checkpoint, _ = newest(root)
    assert checkpoint is not None
    assert run_rejected(config) == (
        f"error: the training rows differ from those of {checkpoint.path}: the data has changed;"
        f" restore it, or remove {root} to start over"
    )


@pytest.mark.jobs
def test_resume_without_a_usable_checkpoint_is_rejected(inputs: Path, tmp_path: Path) -> None:
    config = interrupted_job(inputs, tmp_path)
    root = tmp_path / "out" / "checkpoints"
    manifests = list(root.glob("step_*/manifest.json"))
    for path in manifests:
        path.write_text("{}")

    message = run_rejected(config)

    assert message.startswith(
        f"error: no checkpoint in {root} can be used ({len(manifests)} tried): "
    )
