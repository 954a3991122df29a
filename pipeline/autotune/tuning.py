"""The tuning of one step: trials, until the strategy has enough."""

import hashlib
import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pipeline.autotune.points import Point, add_point, best_of, read_points
from pipeline.autotune.space import Candidate, Space, Value, make_space
from pipeline.autotune.strategies import next_candidate, usual_trials
from pipeline.autotune.trial import run_trial, trial_settings
from pipeline.autotune.warmup_checkpoints import from_warmup_checkpoints
from pipeline.budget.fit import Shortage, shortage
from pipeline.cli import complain, say, write_config
from pipeline.config import StepConfig
from pipeline.errors import EXIT_FAILED, ConfigError
from pipeline.launch.commands import step_command, step_environment
from pipeline.launch.local import PLANNED, count_gpus
from pipeline.plan.output import AUTOTUNE, MARK
from pipeline.plan.plan import Plan
from pipeline.plan.stage import Stage
from pipeline.settings.plain import plain, portable

TRIALS, LOGS = "trials.jsonl", "logs"


@dataclass(frozen=True)
class Tuning:
    """The search for the fastest settings of one step."""

    plan: Plan
    stage: Stage

    def best(self) -> Candidate:
        """Make the trials that are still to be made; return the best candidate of all.

        Raises:
            ConfigError: no candidate fits, or the step finds its input wrong at once.
            SystemExit: nothing could be measured, or a scheduler stopped the trials.
            KeyboardInterrupt: Ctrl-C did.
        """
        if len(self.space.candidates) == 1:
            (only,) = self.space.candidates
            short = self._shortage(only)
            if short is not None:
                raise self._too_large(short)
            say(f"step {self.stage.number}: {self.stage.name} has nothing to tune")
            return only
        points = self.known()
        known = f", {len(points)} of them known" if points else ""
        say(
            f"step {self.stage.number}: {self.stage.name} is tuned; {len(self.space.candidates)}"
            f" candidates, at most {self.trials} trials{known}"
        )
        while (candidate := self._next(points)) is not None:
            point = self._try(candidate, number=len(points) + 1)
            if not points and point.outcome == "refused":
                raise ConfigError(point.message.removeprefix("error: "))
            add_point(self.file, point)
            points.append(point)
            say(f"  trial {len(points)} of {self.trials}   {_described(point)}")
        best = best_of(points)
        if best is None:
            raise self._nothing(points)
        say(self._verdict(best, points))
        return self.space.candidate(best.settings)

    def known(self) -> list[Point]:
        """The trials that were made before."""
        return read_points(self.file, step=self.stage.name, key=self.key)

    def best_known(self) -> Candidate | None:
        """The best candidate of those; None where none was measured."""
        best = best_of(self.known())
        return None if best is None else self.space.candidate(best.settings)

    def plan_with(self, best: Candidate) -> Plan:
        """The plan with the settings of a candidate."""
        config = self.space.config(best)
        return replace(self.plan, configs={**self.plan.configs, self.stage.name: config})

    @property
    def config(self) -> StepConfig:
        """The step's settings as they are."""
        return self.plan.configs[self.stage.name]

    @cached_property
    def space(self) -> Space:
        """The candidates."""
        from pipeline.budget.mesh_sizes import mesh_sizes
        from pipeline.budget.tp_sizes import tp_sizes
        from pipeline.plan.memory import origins_of

        machine, origins = self.plan.machine, origins_of(self.plan.configs)
        return make_space(
            self.config,
            machine,
            fixed=sorted(self.plan.given[self.stage.name]),
            given=self.plan.request.autotune_space,
            tp_sizes=tp_sizes(self.config, processes=machine.processes, origins=origins),
            mesh=mesh_sizes(self.config, machine, origins=origins),
        )

    @property
    def trials(self) -> int:
        """How many may be made."""
        candidates, request = len(self.space.candidates), self.plan.request
        usual = usual_trials(request.autotune_strategy, candidates)
        return min(request.autotune_trials or usual, candidates)

    @property
    def file(self) -> Path:
        """The file of all trials."""
        return self.plan.request.output_dir / AUTOTUNE / TRIALS

    @property
    def logs(self) -> Path:
        """The directory of what trials write."""
        return self.plan.request.output_dir / AUTOTUNE / LOGS

    @cached_property
    def key(self) -> str:
        """What is the same for all trials that can be compared."""
        config = trial_settings(
            self.config,
            self.config.output_dir,
            steps=self.plan.request.autotune_steps,
            world=self.plan.machine.world,
        )
        settings = portable(plain(config))
        for dimension in self.space.dimensions:
            for name in dimension.assigned(dimension.values[0]):
                del settings[name]
        where = [(host.name, host.slots) for host in self.plan.where.hosts]
        known = json.dumps([settings, where, count_gpus(), platform.node()], sort_keys=True)
        return hashlib.sha256(known.encode()).hexdigest()[:16]

    @cached_property
    def _refused(self) -> dict[Candidate, Shortage]:
        """Candidates that don't fit by the plan, as far as it was asked."""
        return {}

    def _next(self, points: Sequence[Point]) -> Candidate | None:
        """What to try next, among those that fit by the plan."""
        while (
            candidate := next_candidate(
                self.space,
                points,
                strategy=self.plan.request.autotune_strategy,
                trials=self.trials,
                seed=self.config.seed,
                refused=list(self._refused),
                too_large=[each for each, short in self._refused.items() if short.of_devices],
            )
        ) is not None:
            short = self._shortage(candidate)
            if short is None:
                return candidate
            self._refused[candidate] = short
        return None

    def _shortage(self, candidate: Candidate) -> Shortage | None:
        from pipeline.budget.step import step_memory

        if self.plan.request.plan == "off":
            return None
        config = from_warmup_checkpoints(self.space.config(candidate), self.plan)
        machine = self.plan.machine
        return shortage(step_memory(config, machine=machine), machine)

    def _try(self, candidate: Candidate, *, number: int) -> Point:
        request = self.plan.request
        out = request.output_dir / AUTOTUNE / ".trial" / self.stage.name
        shutil.rmtree(out.parent, ignore_errors=True)
        config = trial_settings(
            from_warmup_checkpoints(self.space.config(candidate), self.plan),
            out,
            steps=request.autotune_steps,
            world=self.plan.machine.world,
        )
        write_config(config, out / MARK)
        try:
            trial = run_trial(
                step_command(self.stage.module, out / MARK, self.plan.where, request),
                {**step_environment(self.plan.where, request), PLANNED: "1"},
                metrics=out / "metrics.jsonl",
                log=self.logs / f"{self.stage.name}-{number:03}.log",
                steps=request.autotune_steps,
                timeout_seconds=60 * request.autotune_minutes,
            )
        except (KeyboardInterrupt, SystemExit) as stop:
            sentence = (
                f"stopped while {self.stage.title} was tuned; {self.file} keeps"
                f" {number - 1} trials, and the same command goes on"
            )
            if isinstance(stop, KeyboardInterrupt):
                raise KeyboardInterrupt(sentence) from None
            complain(sentence)
            raise
        finally:
            shutil.rmtree(out.parent, ignore_errors=True)
        return Point(
            step=self.stage.name,
            key=self.key,
            settings=self.space.named(candidate),
            outcome=trial.outcome,
            tokens_per_second=trial.tokens_per_second,
            memory_gb=trial.memory_gb,
            seconds=trial.seconds,
            message=trial.message,
        )

    def _nothing(self, points: Sequence[Point]) -> BaseException:
        """What to raise where nothing was measured."""
        number = self.stage.number
        if not points:
            return self._too_large(next(iter(self._refused.values())))
        last = points[-1]
        complain(
            f"no settings of step {number} could be measured; the last of {len(points)} trials"
            f" ended with: {last.message or last.outcome}. What they wrote is in {self.logs}"
        )
        return SystemExit(EXIT_FAILED)

    def _too_large(self, short: Shortage) -> ConfigError:
        return ConfigError(f"{self.stage.title} {short}; of its candidates none takes less")

    def _verdict(self, best: Point, points: Sequence[Point]) -> str:
        start = self.space.start
        before = [each.speed for each in points if self.space.candidate(each.settings) == start]
        gain = ""
        if before and before[0] and best.speed:
            gain = f", {best.speed / before[0]:.2f} times as fast as before"
        left_out = ""
        if self._refused:
            left_out = f"; {len(self._refused)} that don't fit by the plan were not tried"
        return (
            f"{self.stage.title} is fastest with {_words(best.settings)}{gain}, of"
            f" {len(points)} trials{left_out}"
        )


def _described(point: Point) -> str:
    if point.speed is None:
        why = (
            f": {point.message}" if point.outcome in ("refused", "failed") and point.message else ""
        )
        return f"{_words(point.settings)}   {point.outcome}{why}"
    return f"{_words(point.settings)}   {point.speed:,.0f} tokens/s, {point.memory_gb or 0:.2f} GB"


def _words(settings: Mapping[str, Value]) -> str:
    shown = {name: str(value).lower() for name, value in settings.items()}
    return "  ".join(f"{name} {value}" for name, value in shown.items())
