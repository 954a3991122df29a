"""Trackers in addition to metrics.jsonl, with the real libraries if they are installed."""

import importlib.util
import json
import logging
from pathlib import Path

import pytest

from pipeline.run.trackers import Sink, TrackedRun, Trackers, open_trackers
from pipeline.system.errors import ConfigError
from step1_sft.config import SFTConfig


def track_and_resume(name: str, directory: Path) -> str:
    """Log a step, resume, log another, and return the run's id in the tracker."""
    for step in (1, 2):
        run = TrackedRun(directory, "a", {"optim": {"lr": 0.5}}, resumes=step == 2)
        trackers = open_trackers((name,), run)
        trackers.log(step, {"loss": 2.0 / step, "pass@1": float("nan")})
        trackers.close()
    return json.loads((directory / "trackers.json").read_text())[name]


def test_failing_tracker_is_reported_once_and_disabled(caplog: pytest.LogCaptureFixture) -> None:
    steps = list[int]()

    def log(step: int, _: object) -> None:
        steps.append(step)
        if step == 2:
            raise OSError("no route to host")

    trackers = Trackers({"wandb": Sink(log, lambda: pytest.fail("a disabled tracker was closed"))})

    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3, 4):
            trackers.log(step, {"loss": 1.0})
        trackers.close()

    assert steps == [1, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "wandb failed at step 2 and is disabled: no route to host"
    ]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_missing_tracker_package_raises_with_the_install_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run `pip install wandb`"):
        SFTConfig(output_dir=tmp_path, trackers=("wandb",)).require_trackers()


def test_tensorboard_gets_every_scalar(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    for step in (1, 2):
        run = TrackedRun(tmp_path, "run", {}, resumes=step == 2)
        trackers = open_trackers(("tensorboard",), run)
        trackers.log(step, {"loss": 2.0 / step})
        trackers.close()

    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.0), (2, 1.0)]


def test_trackio_resumes_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")

    name = track_and_resume("trackio", tmp_path)

    (run,) = trackio.Api().runs("rlhf-pipeline")
    assert (run.name, run.config["optim.lr"]) == (name, 0.5)
    points = trackio.sqlite_storage.SQLiteStorage.get_logs("rlhf-pipeline", name)
    assert [(point["step"], point["loss"]) for point in points] == [(1, 2.0), (2, 1.0)]
