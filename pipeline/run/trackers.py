"""TensorBoard and Weights & Biases, in addition to metrics.jsonl."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pipeline.config import Tracker

logger = logging.getLogger(__name__)

Sink = tuple[Callable[[int, Mapping[str, int | float]], object], Callable[[], object]]
"""(records metrics at a step, flushes them)."""


def tensorboard(directory: Path) -> Sink:
    """Event files under `<directory>/tensorboard`."""
    from torch.utils.tensorboard import SummaryWriter

    # purge_step hides the events of an earlier run in the same directory.
    writer = SummaryWriter(str(directory / "tensorboard"), purge_step=0)

    def log(step: int, metrics: Mapping[str, int | float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def wandb(directory: Path, name: str, settings: Mapping[str, object]) -> Sink:
    """A run of the W&B project `rlhf-pipeline`, or of the one in WANDB_PROJECT."""
    import wandb  # pyright: ignore[reportMissingImports]

    project = os.environ.get("WANDB_PROJECT", "rlhf-pipeline")
    run = wandb.init(project=project, name=name, dir=str(directory), config=dict(settings))
    return lambda step, metrics: run.log(dict(metrics), step=step), run.finish


class Trackers:
    """Passes metrics to sinks; a sink that fails is logged once and dropped."""

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self._sinks = dict(sinks)

    def log(self, step: int, metrics: Mapping[str, int | float]) -> None:
        """Record `metrics` at `step` in every sink that still works."""
        for name, (log, _) in list(self._sinks.items()):
            try:
                log(step, metrics)
            except Exception as error:  # noqa: BLE001 - hours of training outweigh a curve
                del self._sinks[name]
                logger.warning("%s failed at step %d and is off: %s", name, step, error)

    def close(self) -> None:
        """Flush every sink."""
        while self._sinks:
            name, (_, close) = self._sinks.popitem()
            try:
                close()
            except Exception as error:  # noqa: BLE001 - as in log
                logger.warning("%s could not be closed: %s", name, error)


def open_trackers(
    names: Sequence[Tracker], *, directory: Path, run_name: str, settings: Mapping[str, object]
) -> Trackers:
    """The sinks called `names`, without those that can't be opened, which are logged."""
    sinks: dict[str, Sink] = {}
    for name in names:
        try:
            is_local = name == "tensorboard"
            sinks[name] = (
                tensorboard(directory) if is_local else wandb(directory, run_name, settings)
            )
        except Exception as error:  # noqa: BLE001 - such as no login: metrics.jsonl has it all
            logger.warning("%s can't be opened and is off: %s", name, error)
    return Trackers(sinks)
