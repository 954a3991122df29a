"""The log, one line per message on standard error, and the progress of a step."""

import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress

from pipeline.system.installation import OWN_PACKAGES

logger = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")


def configure_logging(*, is_main: bool) -> None:
    """Log one line per message, `HH:MM:SS message`, to standard error.

    Rank 0 shows our messages and the warnings of libraries; other ranks show only errors.
    """
    import transformers

    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers = [old for old in root.handlers if not isinstance(old, _StderrHandler)]
    root.addHandler(handler)
    root.setLevel(logging.WARNING if is_main else logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # our loader checks for missing weights
    for name in (*OWN_PACKAGES, "__main__"):
        logging.getLogger(name).setLevel(logging.INFO if is_main else logging.ERROR)


class _StderrHandler(logging.Handler):
    """Writes to the current sys.stderr, which a progress bar may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # a closed terminal must not end the run
            sys.stderr.write(self.format(record) + "\n")


MAX_LOG_LINES = 20
"""Approximate number of progress lines if standard error is not a terminal."""

SHOWN_METRICS = ("score", "kl", "loss", "accuracy")
"""Metrics shown while a step runs; metrics.jsonl has all of them."""


class Progress:
    """Shows the progress of one step on standard error."""

    def __init__(self, name: str, total_steps: int) -> None:
        self.name = name
        self.total_steps = total_steps
        self._log_every = math.ceil(total_steps / MAX_LOG_LINES)
        self._bar: RichProgress | None = None

    def start(self) -> None:
        """Show the progress bar if standard error is a terminal."""
        if not sys.stderr.isatty():
            return
        bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            console=Console(stderr=True),
            refresh_per_second=2,
        )
        self._task = bar.add_task(self.name, total=self.total_steps, status="")
        bar.start()
        self._bar = bar

    def update(self, step: int, metrics: Mapping[str, int | float], *, seconds: float) -> None:
        """Show that `step` of `total_steps` steps are done, after `seconds` of training."""
        status = self.status(step, metrics, seconds=seconds)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, status=status)
        elif step in (1, self.total_steps) or step % self._log_every == 0:
            logger.info("%s step %d/%d  %s", self.name, step, self.total_steps, status)

    def stop(self) -> None:
        """Stop updating the bar, and leave it visible."""
        if self._bar is not None:
            self._bar.stop()

    def status(self, step: int, metrics: Mapping[str, int | float], *, seconds: float) -> str:
        """Format the text next to the step number: `SHOWN_METRICS`, speed, and time left."""
        parts = [f"{name} {metrics[name]:.4g}" for name in SHOWN_METRICS if name in metrics]
        if metrics.get("tokens_per_second"):
            parts.append(f"{metrics['tokens_per_second']:,.0f} tokens/s")
        left = seconds / step * (self.total_steps - step)
        took = f"took {format_duration(seconds)}"
        parts.append(f"{format_duration(left)} left" if left else took)
        return "  ".join(parts)


def log_progress(items: Sequence[ItemT], name: str, *, interval: float = 30.0) -> Iterator[ItemT]:
    """Yield `items`, logging progress at most once every `interval` seconds."""
    start = last = time.perf_counter()
    for done, item in enumerate(items):
        now = time.perf_counter()
        if done and now - last >= interval:
            last, left = now, (now - start) / done * (len(items) - done)
            logger.info("%s %d/%d  %s left", name, done, len(items), format_duration(left))
        yield item


def format_duration(seconds: int | float) -> str:
    """Format seconds as `m:ss`, or as `h:mm:ss` for an hour or more."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Clock:
    """Times the phases of a step."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}
        """Seconds by phase."""

    def end(self, phase: str) -> None:
        """End a phase, which started at the end of the previous one."""
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        """Return the seconds of each phase, named `seconds_<phase>`."""
        return {f"seconds_{phase}": seconds for phase, seconds in self.seconds.items()}
