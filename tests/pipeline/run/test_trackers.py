"""TensorBoard and W&B in addition to metrics.jsonl."""

import importlib.util
import logging
from pathlib import Path

import pytest

from pipeline.run.run import Trackers, open_trackers
from pipeline.system.errors import ConfigError
from step1_sft.config import SFTConfig


def test_a_sink_that_fails_is_named_once_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    steps = list[int]()

    def log(step: int, _: object) -> None:
        steps.append(step)
        if step == 2:
            raise OSError("no route to host")

    trackers = Trackers({"wandb": (log, lambda: pytest.fail("it is closed"))})

    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3, 4):
            trackers.log(step, {"loss": 1.0})
        trackers.close()

    assert steps == [1, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "wandb failed at step 2 and is disabled: no route to host"
    ]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_missing_package_stops_the_run_with_the_command_that_installs_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run `pip install wandb`"):
        SFTConfig(output_dir=tmp_path, trackers=("wandb",)).require_trackers()


def test_tensorboard_gets_every_scalar(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    trackers = open_trackers(("tensorboard",), directory=tmp_path, run_name="run", settings={})
    trackers.log(1, {"loss": 2.0})
    trackers.log(2, {"loss": 0.5})
    trackers.close()

    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.0), (2, 0.5)]
