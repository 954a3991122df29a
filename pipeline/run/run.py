"""A training run of one step: its directory, files and log. Each step has its own training loop."""

import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from pipeline.cli.options import write_config
from pipeline.config import StepConfig
from pipeline.engine.checkpoint.format import list_steps, parse_step
from pipeline.engine.checkpoint.history import list_candidates
from pipeline.files.durable import discard, replace_durably
from pipeline.files.lock import RunLock
from pipeline.parallel.mesh import Mesh
from pipeline.plan.output import CHECKPOINTS, DIVERGED, LOCK
from pipeline.run.trackers import TrackedRun, Trackers, open_trackers
from pipeline.settings.fields import flatten, non_default_values, to_plain
from pipeline.system.errors import ConfigError
from pipeline.system.logs import Progress
from pipeline.system.memory import memory_bytes
from pipeline.system.signals import ExitOnSignal

logger = logging.getLogger(__name__)

STALE = ("result.json", "samples.json", "lab.json", "predictions.jsonl", DIVERGED)


class Run:
    """Context manager around a step's loop; only the main process writes.

    On entry: creates the directory and locks it, refuses to overwrite the checkpoints of an
    unfinished run, writes the resolved settings to `config.yaml`, removes the results of an earlier
    run, and starts a fresh `metrics.jsonl`; when resuming, `load_state_dict` truncates it to the
    checkpoint instead. On exit, including by Ctrl-C, every file ends with a complete line.
    """

    def __init__(self, config: StepConfig, *, name: str, total_steps: int, mesh: Mesh) -> None:
        self.config = config
        self.name = name
        self.total_steps = total_steps
        self.mesh, self.is_main = mesh, mesh.is_main
        self.step = 0
        self.tokens = 0
        self.resumes = config.resume
        """Whether to resume an earlier run; the main process decides."""
        self._progress = Progress(name, total_steps)
        self._lock = ExitStack()
        self._trackers = Trackers({})
        self._metrics: IO[bytes] | None = None
        self._tokens_per_second = 0.0
        self._exit_on_signal = ExitOnSignal()

    def __enter__(self) -> "Run":
        self._start = self._step_end = time.perf_counter()
        self._seconds_before = self._seconds_trained = 0.0
        self._logged_at = (0, 0.0)
        if self.is_main:
            self._lock.enter_context(RunLock(self.path(LOCK)))
            self._refuse_unfinished_run()
            self.resumes = self.config.resume and not self.path(DIVERGED).exists()
            self.config.require_trackers()
            run = TrackedRun(self.config.output_dir, self.name, to_plain(self.config), self.resumes)
            self._trackers = open_trackers(self.config.trackers, run)
            write_config(replace(self.config, resume=False), self.path("config.yaml"))
            for stale in STALE:
                self.path(stale).unlink(missing_ok=True)
            for pattern in (".writing-*", "*/.writing-*"):  # left by a killed export
                for leftover in self.config.output_dir.glob(pattern):
                    discard(leftover)
            # Unbuffered: each line is one write, so that a killed run leaves complete lines.
            mode = "ab" if self.resumes else "wb"
            self._metrics = self.path("metrics.jsonl").open(mode, buffering=0)
            self._progress.start()
        self._exit_on_signal.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:  # noqa: ANN401
        self._exit_on_signal.__exit__(*error)
        if self._metrics is None:
            return
        self._lock.close()
        self._progress.stop()
        self._metrics.close()
        if error[0] is KeyboardInterrupt or self._exit_on_signal.received is not None:
            logger.info(
                "%s stopped%s; --resume %s",
                self.name,
                f" after step {self.step} of {self.total_steps}" if self.step else "",
                self.describe_resume(),
            )
        self._trackers.close()

    def describe_resume(self) -> str:
        """Describe the effect of `--resume`, as the end of a sentence."""
        newest = next(iter(list_candidates(self.path(CHECKPOINTS))), None)
        step = None if newest is None else parse_step(newest)
        return "starts from step 1" if step is None else f"continues after step {step}"

    def _refuse_unfinished_run(self) -> None:
        """Refuse to overwrite the checkpoints of an unfinished run."""
        unfinished = not any(self.path(name).exists() for name in ("result.json", DIVERGED))
        if not self.config.resume and unfinished and list_steps(self.path(CHECKPOINTS)):
            self._lock.close()
            raise ConfigError(
                f"{self.config.output_dir} contains checkpoints of an unfinished run; pass --resume"
                f" to continue it, or remove {self.path(CHECKPOINTS)} to start over"
            )

    @property
    def seconds(self) -> float:
        """Seconds since entry, plus the seconds of earlier runs that this run resumes."""
        return self._seconds_before + time.perf_counter() - self._start

    def path(self, name: str) -> Path:
        """Return `<output_dir>/<name>`."""
        return self.config.output_dir / name

    def discard(self, name: str) -> None:
        """Remove an earlier run's `<output_dir>/<name>`, which this run doesn't write."""
        if self.mesh.is_main:
            shutil.rmtree(self.path(name), ignore_errors=True)

    def log(self, step: int, /, *, tokens: int = 0, **metrics: int | float) -> None:
        """Record that `step` optimizer steps are done, the last one with `tokens` tokens.

        All processes must call this after every step: it updates the progress bar, and after every
        `log_every`-th step and the last one it writes a line to metrics.jsonl, with
        `tokens_per_second` since the previous line, excluding evaluations, and the largest
        process's `memory_gb`.
        """
        now = time.perf_counter()
        self._seconds_trained += now - self._step_end
        self._step_end = now
        self.step = step
        self.tokens += tokens
        is_due = step % self.config.log_every == 0 or step == self.total_steps
        if is_due:
            metrics["memory_gb"] = round(self.mesh.world.max(memory_bytes()) / 1e9, 3)
        if self._metrics is None:
            return
        if is_due:
            tokens_before, seconds_before = self._logged_at
            self._logged_at = (self.tokens, self._seconds_trained)
            elapsed = max(self._seconds_trained - seconds_before, 1e-9)
            self._tokens_per_second = (self.tokens - tokens_before) / elapsed
            speed = {"tokens_per_second": self._tokens_per_second}
            self._write(step, {"tokens": tokens, **speed, **metrics}, {})
        shown = {"tokens_per_second": self._tokens_per_second, **metrics}
        self._progress.update(step, shown, seconds=self._seconds_trained)

    def log_eval(
        self,
        step: int,
        metrics: Mapping[str, int | float],
        *,
        details: Mapping[str, object] | None = None,
    ) -> None:
        """Record an evaluation after `step` optimizer steps, under names starting with `eval_`.

        `details` are additional fields of the line, which only the report reads.
        """
        # The time since the last step was spent on evaluation or, before step 1, loading.
        self._step_end = time.perf_counter()
        if self._metrics is None:
            return
        named = {f"eval_{name}": value for name, value in metrics.items()}
        self._write(step, named, details or {})
        known = {name: value for name, value in metrics.items() if not math.isnan(value)}
        shown = "  ".join(f"{name} {value:.4g}" for name, value in known.items())
        logger.info("%s evaluated at step %d/%d  %s", self.name, step, self.total_steps, shown)

    def log_event(self, step: int, name: str, details: Mapping[str, object]) -> None:
        """Record an event that occurred after `step` iterations; only the report reads it."""
        if self._metrics is not None:
            self._write(step, {}, {name: details})

    def finish(self, *, eval: Mapping[str, object], **extra: object) -> None:  # noqa: A002
        """Write result.json atomically, after everything else, to mark the step as finished.

        The file contains seconds, steps, tokens, the number of processes along each axis (`mesh`),
        `eval`, the settings that differ from the defaults, and the fields in `extra`.
        """
        if self._metrics is None:
            return
        result = {
            "seconds": round(self.seconds, 3),
            "steps": self.step,
            "tokens": self.tokens,
            "mesh": self.mesh.shape,
            "eval": dict(eval),
            "changed_settings": changed_settings(replace(self.config, resume=False)),
            **extra,
        }
        os.fsync(self._metrics.fileno())
        text = json.dumps(json_safe(result), indent=2, allow_nan=False) + "\n"
        replace_durably(self.path("result.json"), text.encode())

    def record_divergence(self, sentence: str) -> None:
        """Record, instead of a result, that the run diverged and why."""
        if self.is_main:
            note = {"step": self.step, "sentence": sentence}
            replace_durably(self.path(DIVERGED), (json.dumps(note, indent=2) + "\n").encode())

    def state_dict(self) -> dict[str, Any]:
        """Return the state for resuming, as seen by the main process, which writes the files."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "seconds_trained": self._seconds_trained,
            "logged_at": self._logged_at,
            "metrics_bytes": self._metrics_bytes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; remove the lines of metrics.jsonl that were logged later."""
        self.step, self.tokens = state["step"], state["tokens"]
        self._seconds_before = state["seconds"] - (time.perf_counter() - self._start)
        self._seconds_trained = state["seconds_trained"]
        tokens, seconds = state["logged_at"]
        self._logged_at = (tokens, seconds)
        if self._metrics is not None:
            self._metrics.truncate(min(state["metrics_bytes"], self._metrics_bytes))

    def discard_log(self) -> None:
        """Discard the log of an earlier run; called when there is no state to resume from."""
        if self._metrics is not None:
            self._metrics.truncate(0)

    @property
    def _metrics_bytes(self) -> int:
        return 0 if self._metrics is None else os.fstat(self._metrics.fileno()).st_size

    def _write(
        self, step: int, metrics: Mapping[str, int | float], details: Mapping[str, object]
    ) -> None:
        """Write a line to metrics.jsonl; trackers receive only its `metrics`."""
        assert self._metrics is not None
        line = json_safe({"step": step, "seconds": round(self.seconds, 3), **metrics, **details})
        self._metrics.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        if metrics:
            self._trackers.log(step, metrics)


def changed_settings(config: StepConfig) -> dict[str, object]:
    """Return the dotted names and values of settings that differ from the step's defaults.

    Settings of models that the step does not load are omitted.
    """
    defaults = flatten(to_plain(type(config)(output_dir=config.output_dir)))
    changed = non_default_values(config, defaults)
    unused = config.unused_roles
    return {name: value for name, value in changed.items() if name.partition(".")[0] not in unused}


def get_training_id(path: str) -> str | None:
    """Return the id of a model's training run, or None if `path` contains no readable result.json.

    The id depends on steps, tokens and metrics. Metrics on held-out rows have full precision, so
    only equal weights have equal metrics. Time and settings are left out, so a bitwise repetition
    of a training run has the same id.
    """
    try:
        result = json.loads((Path(path) / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(result, dict):
        return None
    known = [result.get(name) for name in ("steps", "tokens", "eval")]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


def json_safe(value: object) -> object:
    """Replace NaN and infinities in `value` with None, because JSON lacks them."""
    if isinstance(value, Mapping):
        return {key: json_safe(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [json_safe(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
