"""The resumable state of a step: its contents, saving, and resuming."""

import logging
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from pipeline.config import FrozenModelConfig, StepConfig, affects_result
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.format import MANIFEST, Fragment
from pipeline.engine.checkpoint.history import (
    ROLLBACK,
    RollbackRecord,
    find_newest_valid,
    list_healthy,
)
from pipeline.engine.checkpoint.parts import HasWeights, HealthMonitor, Stateful
from pipeline.engine.checkpoint.state import (
    describe,
    frozen_fragments,
    load,
    merge_descriptions,
    read_weights,
    trained_fragments,
    weights_fragments,
)
from pipeline.engine.checkpoint.writer import CheckpointWriter
from pipeline.engine.engine import Engine
from pipeline.kernels.host_allocator import return_freed_memory
from pipeline.models.hf.consolidate import TOKENIZER, describe_model
from pipeline.models.hf.load import model_path
from pipeline.plan.output import CHECKPOINTS
from pipeline.run.run import Run, get_training_id
from pipeline.settings.fields import make_portable, to_plain
from pipeline.system.errors import CheckpointError, ConfigError, JobFailed, JobStopped, require
from pipeline.system.faults import fault_point
from pipeline.system.signals import EXIT_INTERRUPTED, EXIT_REQUEUE, INTERRUPTS, StopSignals
from pipeline.system.torch_process import random_state, set_random_state

logger = logging.getLogger(__name__)

T = TypeVar("T")

SAVE_TIMEOUT_SECONDS = 5
"""Seconds to wait for a save if the loop ends early; the save may be waiting for a dead process."""


class Checkpoints:
    """Saves a step's state during the run, and resumes from the newest valid checkpoint.

    `engines` and `parts` contain the step's entire mutable state. Each process saves its own shards
    and random number generators; the rest is the same on all processes. With `guards`, the run may
    be rolled back, so the state is also saved before the first step, and healthy checkpoints are
    kept while a rollback may need them.
    """

    def __init__(
        self,
        run: Run,
        *,
        engines: Mapping[str, Engine],
        parts: Mapping[str, Stateful | HasWeights | None],
        tokenizer: PreTrainedTokenizerBase,
        data: str,
        guards: HealthMonitor | None = None,
    ) -> None:
        config = self.config = run.config
        self.run, self.data = run, data
        world = self._world = run.mesh.world
        self.root = run.path(CHECKPOINTS)
        self.engines = engines
        self.parts = {
            "run": run,
            **{name: part for name, part in parts.items() if part is not None},
        }
        self.done = 0
        """Steps completed so far."""
        self.is_new = True
        """Whether the run starts from scratch rather than from a checkpoint."""
        self._saved_step = 0
        """The step whose state was last saved or loaded."""
        self._guards = guards
        self._rollbacks = 0
        self._once: dict[str, Any] = {}
        self._base: str | None = None
        job, resumes = world.gather_objects((uuid.uuid4().hex[:12], run.resumes))[0]
        if resumes:
            self._resume()
        elif run.is_main:
            shutil.rmtree(self.root, ignore_errors=True)
        world.barrier()
        self._writer = CheckpointWriter(
            self.root,
            job=job,
            rank=world.rank,
            world_size=world.size,
            keep_last=config.keep_last,
            margin=None if guards is None else guards.window,
        )
        if run.is_main:
            tokenizer.save_pretrained(self.root / TOKENIZER)
        if self._base is None and any(describe(engine)["frozen"] for engine in engines.values()):
            self._base = f"base-{job}"
        self._saved_at = time.monotonic()

    def once(self, name: str, compute: Callable[[], T]) -> T:
        """Call `compute` once per run, and return its result, which checkpoints store as JSON."""
        if name not in self._once:
            self._once[name] = compute()
        return self._once[name]

    def require_same_start(self, model: FrozenModelConfig) -> str:
        """Return the training id, or else the path, of the model that the run started from.

        Raises:
            ConfigError: the run resumes, and the model has been trained again.
        """
        path = model_path(model)
        training = get_training_id(path)
        require(
            self.once("training", lambda: training) == training,
            f"the model in {path} is not the one that this run started from: it was retrained;"
            f" restore the original, or remove {self.root} to start over",
        )
        return training or path

    def steps(self, *, should_stop: Callable[[], bool] = lambda: False) -> Iterator[int]:
        """Yield the numbers of the steps to run, until `should_stop()` is true.

        All processes must iterate. The state is saved after a step if a save is due, and after the
        last step (which a long evaluation may follow) unless `save_every` is null.

        Raises:
            SystemExit: Ctrl-C or a scheduler's signal stops the run; the state is saved.
        """
        timeout = SAVE_TIMEOUT_SECONDS
        try:
            fault_point("steps.begin")
            with StopSignals(self._log_signal) as signals:
                self._check_signals(signals)
                if self.is_new and self._guards is not None and self._guards.window is not None:
                    self.save(0)
                while self.done < self.run.total_steps and not should_stop():
                    step, rollbacks = self.done + 1, self._rollbacks
                    yield step
                    if rollbacks == self._rollbacks:
                        self.done = step
                    self._save_or_exit(signals, due=self._is_due(self.done))
                return_freed_memory()
                self._save_or_exit(signals, due=self.config.save_every is not None)
                self._writer.wait()
            # The state is saved, so later signals may stop the process at once; handle one that
            # arrived since the last check.
            self._check_signals(signals)
            timeout = None
        finally:
            self._writer.wait(timeout)

    def save(self, step: int) -> None:
        """Save the state after `step`; training continues while the files are written."""
        if self._base is not None:  # write it once
            is_missing = self.run.is_main and not (self.root / self._base / MANIFEST).is_file()
            if self._world.sum(is_missing):
                frozen = [frozen_fragments(engine, name) for name, engine in self.engines.items()]
                self._writer.save_base(self._base, chain(*frozen))
        self._writer.save(step, self._fragments(), self._get_state(), base=self._base)
        self._saved_at = time.monotonic()

    def newest_healthy(self, *, up_to: int) -> Checkpoint:
        """Find the newest checkpoint up to step `up_to` that is healthy and valid.

        Raises:
            CheckpointError: there is no such checkpoint.
        """
        self._writer.wait()
        checkpoint = find_newest_valid(
            self.root, self._world, list_paths=lambda root: list_healthy(root, up_to)
        )
        if checkpoint is None:
            raise CheckpointError(f"{self.root} has no healthy checkpoint up to step {up_to}")
        return checkpoint

    def roll_back(self, checkpoint: Checkpoint, parts: Mapping[str, Any]) -> None:
        """Roll the run back to `checkpoint`, with the given state for `parts`.

        The log and the elapsed time are kept. The next step is the one after the checkpoint;
        later checkpoints are removed. A run that is killed during or after a rollback resumes as if
        it had not been killed. All processes must call this, within `steps`.
        """
        run = {**self.run.state_dict(), "step": checkpoint.step}
        record = RollbackRecord(self._rollbacks + 1, checkpoint.step, {**parts, "run": run})
        self._writer.roll_back(checkpoint.step)
        if self.run.is_main:
            record.write(self.root)
        self._world.barrier()
        self._load(checkpoint, record)

    def _is_due(self, step: int) -> bool:
        interval = self.config.save_interval
        if interval is None:
            return False
        if interval.steps is not None:
            return step % interval.steps == 0
        # Rank 0's clock decides for all.
        return self.run.is_main and time.monotonic() - self._saved_at >= interval.seconds

    def _save_or_exit(self, signals: StopSignals, *, due: bool) -> None:
        """Save the state if due or if any process received a signal; in the latter case, exit."""
        received = signals.received
        interrupted, terminated, due_somewhere = self._world.sums(
            [received in INTERRUPTS, received is not None and received not in INTERRUPTS, due]
        )
        stops = bool(interrupted or terminated)
        if (stops or due_somewhere) and self._saved_step != self.done:
            self.save(self.done)
            self._saved_step = self.done
        if stops:
            self._exit(EXIT_REQUEUE if terminated else EXIT_INTERRUPTED)

    def _check_signals(self, signals: StopSignals) -> None:
        """Exit if a signal was received; called at the beginning and end of the loop.

        Processes get here at slightly different times, and outside the loop a signal stops a
        process immediately. If one was stopped, this process got the signal too, and also exits.
        """
        try:
            self._save_or_exit(signals, due=False)
        except RuntimeError:
            if signals.received is None:
                raise
            interrupted = signals.received in INTERRUPTS
            raise JobFailed(EXIT_INTERRUPTED if interrupted else EXIT_REQUEUE) from None

    def _exit(self, code: int) -> None:
        self._writer.wait()
        saved = self._writer.failure is None
        logger.info(
            "%s stopped after step %d of %d and %s; --resume %s",
            self.run.name,
            self.done,
            self.run.total_steps,
            "has saved its state" if saved else "failed to save its state (see above)",
            self.run.describe_resume(),
        )
        raise JobStopped(code)

    def _log_signal(self, number: signal.Signals, *, aborts: bool) -> None:
        """Report the effect of a signal immediately, since the current step may be long."""
        if aborts:
            logger.info("%s was aborted; --resume %s", self.run.name, self.run.describe_resume())
        else:
            logger.info(
                "%s received %s: finishing the current step, saving the state and exiting; Ctrl-C"
                " %s",
                self.run.name,
                number.name,
                "again aborts" if number is signal.SIGINT else "aborts",
            )

    def _fragments(self) -> Iterator[Fragment]:
        for name, engine in self.engines.items():
            yield from trained_fragments(engine, name)
        for name, part in self._parts_with_weights():
            yield from weights_fragments(part.engine, name, part.weights)
        for name, tensor in random_state().items():
            yield Fragment(f"random/{self._world.rank}/{name}", 0, tensor)

    def _get_state(self) -> dict[str, Any]:
        health: dict[str, Any] = {}
        if self._guards is not None:
            health = {"healthy": self._guards.is_healthy, "rollbacks": self._rollbacks}
        return {
            "name": self.run.name,
            "data": self.data,
            "settings": result_settings(self.config),
            "engines": {name: describe(engine) for name, engine in self.engines.items()},
            "models": {name: self._describe_model(engine) for name, engine in self.engines.items()},
            "parts": {
                name: part.state_dict()
                for name, part in self.parts.items()
                if isinstance(part, Stateful)
            },
            "weights": [name for name, _ in self._parts_with_weights()],
            "once": self._once,
            **health,
        }

    def _describe_model(self, engine: Engine) -> dict[str, Any] | None:
        """Return what is needed to rebuild an engine's model, merged over its shards, if known."""
        if (description := describe_model(engine.model)) is None:
            return None
        return merge_descriptions(engine.model_parallel.gather_objects(description))

    def _parts_with_weights(self) -> Iterator[tuple[str, HasWeights]]:
        for name, part in self.parts.items():
            if isinstance(part, HasWeights) and part.weights:
                yield name, part

    def _resume(self) -> None:
        """Load the newest valid checkpoint, or start from scratch."""
        record = self._world.gather_objects(RollbackRecord.read(self.root))[0]
        checkpoint = find_newest_valid(self.root, self._world)
        if checkpoint is not None and record is not None and record.invalidates(checkpoint.state):
            checkpoint = find_newest_valid(
                self.root, self._world, list_paths=lambda root: list_healthy(root, record.step)
            )
        if checkpoint is not None:
            check_same_run(checkpoint, self.config, self.data)
            applies = record is not None and record.invalidates(checkpoint.state)
            self._load(checkpoint, record if applies else None)
            return
        if self.run.is_main:
            (self.root / ROLLBACK).unlink(missing_ok=True)
        logger.info("%s has no checkpoint to resume from in %s", self.run.name, self.root)
        self.run.discard_log()

    def _load(self, checkpoint: Checkpoint, record: RollbackRecord | None = None) -> None:
        """Load the state; a rollback record overrides parts of it and removes later checkpoints."""
        state = checkpoint.state
        parts = state["parts"] if record is None else {**state["parts"], **record.parts}
        for name, engine in self.engines.items():
            load(engine, name, checkpoint, state["engines"][name])
        for name, part in self.parts.items():
            if isinstance(part, Stateful):
                part.load_state_dict(parts[name])
            if isinstance(part, HasWeights) and name in state["weights"]:
                if not part.weights:
                    groups = part.engine.groups
                    part.weights = [torch.zeros(group.masters.numel) for group in groups]
                read_weights(part.engine, name, checkpoint, part.weights)
            elif isinstance(part, HasWeights):
                part.weights = []
        self._once = dict(state["once"])
        self._base = checkpoint.manifest.base
        # Ranks that did not exist in the saving job keep their generators.
        random = checkpoint.read_prefix(f"random/{self._world.rank}/")
        if random:
            set_random_state(random)
        self._rollbacks = state.get("rollbacks", 0) if record is None else record.count
        if record is not None and self.run.is_main:
            record.remove_later_steps(self.root)
        self.is_new = False
        self.done = self._saved_step = checkpoint.step
        logger.info("resuming %s after step %d", self.run.name, self.done)


def result_settings(config: StepConfig) -> dict[str, Any]:
    """Return the settings that affect the result, and so can't change on resume, by dotted name."""
    return _affecting_result(make_portable(to_plain(config)))


def check_same_run(checkpoint: Checkpoint, config: StepConfig, data: str) -> None:
    """Raise an error if the checkpoint belongs to a run with different settings or data.

    Raises:
        ConfigError: a setting that affects the result, or the data, has changed.
    """
    state, settings = checkpoint.state, result_settings(config)
    start_over = f"remove {checkpoint.path.parent} to start over"
    saved_settings = _affecting_result(state["settings"])
    for name in sorted(saved_settings.keys() | settings.keys()):
        saved, current = saved_settings.get(name), settings.get(name)
        if saved != current:
            raise ConfigError(
                f"{checkpoint.path} was saved with {name} {saved}, but this run has {current};"
                f" restore that setting, or {start_over}"
            )
    if state["data"] != data:
        raise ConfigError(
            f"the training rows differ from those of {checkpoint.path}: the data has changed;"
            f" restore it, or {start_over}"
        )


def _affecting_result(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if affects_result(name)}
