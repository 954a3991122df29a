"""Destinations of metrics in addition to metrics.jsonl: TensorBoard, W&B and Trackio."""

import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.config import Tracker
from pipeline.files.durable import replace_durably
from pipeline.settings.fields import flatten

logger = logging.getLogger(__name__)

PROJECT = "rlhf-pipeline"
"""Default name of the project or experiment."""

RECORD = "trackers.json"
"""File in the step's directory with the id of the run in each tracker, for `--resume`."""

Metrics = Mapping[str, int | float]


class Sink(NamedTuple):
    """An open run of a tracker: its id, and functions that record metrics and close the run."""

    log: Callable[[int, Metrics], object]
    close: Callable[[], object]
    id: str = ""


class TrackedRun(NamedTuple):
    """The run of a step that is tracked."""

    directory: Path
    name: str
    settings: Mapping[str, Any]
    resumes: bool


def tensorboard(run: TrackedRun, old_id: str) -> Sink:  # noqa: ARG001  # events have no id
    """Open a sink that writes event files under `<directory>/tensorboard`."""
    from torch.utils.tensorboard import SummaryWriter

    # purge_step hides events of an earlier run in the directory.
    events = str(run.directory / "tensorboard")
    writer = SummaryWriter(events, purge_step=None if run.resumes else 0)

    def log(step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return Sink(log, writer.close)


def wandb(run: TrackedRun, old_id: str) -> Sink:
    """Open a sink for a run of the W&B project in WANDB_PROJECT."""
    import wandb

    project, resume = os.environ.get("WANDB_PROJECT", PROJECT), "allow" if old_id else None
    about = {"dir": str(run.directory), "config": dict(run.settings)}
    opened = wandb.init(project=project, name=run.name, id=old_id or None, resume=resume, **about)
    return Sink(lambda step, metrics: opened.log(dict(metrics), step), opened.finish, opened.id)


def trackio(run: TrackedRun, old_id: str) -> Sink:
    """Open a sink for a run of the Trackio project in TRACKIO_PROJECT."""
    import trackio

    project, resume = os.environ.get("TRACKIO_PROJECT", PROJECT), "allow" if old_id else "never"
    name = old_id or f"{run.name}-{secrets.token_hex(4)}"  # Trackio finds runs by their name
    opened = trackio.init(project, name, config=flatten(run.settings), resume=resume, embed=False)
    return Sink(lambda step, metrics: opened.log(dict(metrics), step), trackio.finish, name)


OPENERS = {opener.__name__: opener for opener in (tensorboard, wandb, trackio)}


class Trackers:
    """Passes metrics to sinks; a sink that fails is dropped with a warning."""

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self._sinks = dict(sinks)

    def log(self, step: int, metrics: Metrics) -> None:
        """Record `metrics` at `step` in every sink that still works."""
        for name, sink in list(self._sinks.items()):
            with _drop_on_error(self._sinks, name, f"failed at step {step}"):
                sink.log(step, metrics)

    def close(self) -> None:
        """Flush and close every sink."""
        for name, sink in list(self._sinks.items()):
            with _drop_on_error(self._sinks, name, "could not be closed"):
                sink.close()
        self._sinks.clear()


def open_trackers(names: Sequence[Tracker], run: TrackedRun) -> Trackers:
    """Open the sinks called `names`; if the step resumes, continue the runs that it recorded."""
    record = run.directory / RECORD
    known = json.loads(record.read_text()) if run.resumes and record.is_file() else {}
    sinks: dict[str, Sink] = {}
    for name in names:
        with _drop_on_error(sinks, name, "can't be opened"):  # such as no login
            sinks[name] = OPENERS[name](run, known.get(name, ""))
    known |= {name: sink.id for name, sink in sinks.items() if sink.id}
    if known:
        replace_durably(record, (json.dumps(known, indent=2) + "\n").encode())
    return Trackers(sinks)


@contextmanager
def _drop_on_error(sinks: dict[str, Sink], name: str, problem: str) -> Iterator[None]:
    """Drop a sink, without raising, if the `with` block fails: metrics.jsonl has all metrics."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - hours of training outweigh a curve
        sinks.pop(name, None)
        logger.warning("%s %s and is disabled: %s", name, problem, error)
