"""Autotuning of a plan: short runs of each step with other settings; the fastest stay.

The micro-batch is doubled until that stops paying, then recomputation and the other ZeRO stages
are tried, each once. Settings that the user gave stay.

OUT/autotune/trials.jsonl     a line for each trial
OUT/autotune/logs/            the output of the trials
OUT/autotune/best.yaml        the best settings of the steps tuned so far
"""

import json
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.autotune.best import write_best
from pipeline.autotune.trial import MODELS, Trial, run_trial, with_trial_models
from pipeline.budget.fit import shortage
from pipeline.budget.fixes import Settings, changed, of_models, trained_models
from pipeline.cli import complain, say
from pipeline.config import StepConfig
from pipeline.errors import EXIT_FAILED, ConfigError
from pipeline.installation import TRAIN
from pipeline.plan.output import AUTOTUNE
from pipeline.plan.plan import Plan
from pipeline.plan.stage import Stage

BEST, TRIALS, LOGS = "best.yaml", "trials.jsonl", "logs"

GAIN = 1.03
"""A change is kept if the step is faster by this factor; single steps differ by a few percent."""


def tune(plan: Plan) -> Plan:
    """The plan with the fastest settings that trials find for each unfinished step.

    Raises:
        ConfigError: a step has wrong input.
        SystemExit: no trial of a step could be measured, or a scheduler stopped the trials.
        KeyboardInterrupt: Ctrl-C stopped them.
    """
    out = plan.request.output_dir / AUTOTUNE
    out.mkdir(parents=True, exist_ok=True)
    (out / TRIALS).unlink(missing_ok=True)
    chosen: dict[str, Settings] = {}
    try:
        for stage in plan.stages:
            if stage.name in plan.finished:
                continue
            best = _Tuning(plan, stage).run()
            config = changed(plan.configs[stage.name], best)
            plan = replace(plan, configs={**plan.configs, stage.name: config})
            chosen[stage.name] = best
            write_best(out / BEST, plan.request, plan.all_stages, plan.configs, chosen)
    finally:
        shutil.rmtree(out / MODELS, ignore_errors=True)
    command = shlex.join(["--config", str(out / BEST)])
    say(f"the best settings: {out / BEST}; `{TRAIN} {command}` runs with them")
    return plan


@dataclass
class _Tuning:
    """The trials of one step."""

    plan: Plan
    stage: Stage
    trials: list[tuple[Settings, Trial]] = field(default_factory=list[tuple[Settings, Trial]])

    def run(self) -> Settings:
        """The settings of the fastest trial."""
        say(f"step {self.stage.number}: {self.stage.name} is tuned")
        best, speed = self._best_micro_batch({}, 0.0)
        for settings in self._alternatives():
            together = {**best, **settings}
            trial = self._try(together)
            if trial is not None and trial.speed > GAIN * speed:
                best, speed = self._best_micro_batch(together, trial.speed)
        if not speed:
            raise self._nothing_measured()
        first = next((trial.speed for _, trial in self.trials if trial.speed), speed)
        say(
            f"{self.stage.title} is fastest with {_words(best) or 'its settings as they are'}:"
            f" {speed / first:.2f} times the first trial, of {len(self.trials)} trials"
        )
        return best

    def _best_micro_batch(self, settings: Settings, speed: float) -> tuple[Settings, float]:
        """The settings with the fastest micro-batch, and its speed; `speed` is that of `settings`.

        The size is doubled while that pays, and halved if the first doubling doesn't.
        """
        if not speed:
            trial = self._try(settings)
            speed = trial.speed if trial else 0.0
        if "micro_batch_size" in self._given:
            return settings, speed
        larger = self._scaled(settings, speed, factor=2)
        return larger if larger[1] > speed else self._scaled(settings, speed, factor=0.5)

    def _scaled(self, settings: Settings, speed: float, *, factor: float) -> tuple[Settings, float]:
        """The settings with the micro-batch multiplied by `factor` while that pays."""
        base = self._config(settings)
        most = -(-base.batch_size // base.workload(self.plan.machine.world).data_processes)
        best, size = settings, base.micro_batch_size
        while size * factor >= 1 and (factor < 1 or size < most):
            size = int(size * factor)
            trial = self._try({**settings, "micro_batch_size": size})
            measured = trial.speed if trial else 0.0
            if measured < GAIN * speed:
                break
            if measured:
                best, speed = {**settings, "micro_batch_size": size}, measured
        return best, speed

    def _alternatives(self) -> Iterator[Settings]:
        """Recomputation and the ZeRO stages that the step doesn't use."""
        config = self.plan.configs[self.stage.name]
        (model, *_) = trained_models(config).values()
        options: list[Settings] = [{"gradient_checkpointing": not model.gradient_checkpointing}]
        if config.workload(self.plan.machine.world).shards > 1:
            options += [{"zero_stage": stage} for stage in range(4) if stage != model.zero_stage]
        for option in options:
            settings = of_models(config, option)
            if not self._given & settings.keys():
                yield settings

    @property
    def _given(self) -> frozenset[str]:
        """Dotted names of the settings that the user gave."""
        return self.plan.given[self.stage.name]

    def _config(self, settings: Settings) -> StepConfig:
        return changed(self.plan.configs[self.stage.name], settings)

    def _try(self, settings: Settings) -> Trial | None:
        """Run a trial; None where the settings contradict each other or don't fit by the plan.

        Raises:
            ConfigError: the step refuses its input.
        """
        from pipeline.budget.memory import step_memory

        machine = self.plan.machine
        try:
            config = with_trial_models(self._config(settings), self.plan)
            config.parallel.check(machine.world)
        except ConfigError:
            return None
        if self.plan.request.plan != "off" and shortage(
            step_memory(config, machine=machine), machine
        ):
            return None
        number = len(self.trials) + 1
        trial = run_trial(self.plan, self.stage, config, log=self._logs / self._log_name(number))
        if trial.outcome == "refused" and number == 1:
            raise ConfigError(trial.message.removeprefix("error: "))
        self.trials.append((settings, trial))
        self._record(settings, trial)
        say(f"  trial {number}   {_words(settings) or 'as it is'}   {trial}")
        return trial

    def _log_name(self, number: int) -> str:
        return f"{self.stage.name}-{number:03}.log"

    @property
    def _logs(self) -> Path:
        return self.plan.request.output_dir / AUTOTUNE / LOGS

    def _record(self, settings: Settings, trial: Trial) -> None:
        record = {"step": self.stage.name, "settings": dict(settings), **vars(trial)}
        with (self._logs.parent / TRIALS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _nothing_measured(self) -> BaseException:
        """The error where no trial was measured."""
        if not self.trials:
            return ConfigError(
                f"{self.stage.title} does not fit with any of its candidates; --dry-run shows its"
                " memory"
            )
        last = self.trials[-1][1]
        complain(
            f"no settings of step {self.stage.number} could be measured; the last of"
            f" {len(self.trials)} trials ended with: {last.message or last.outcome}; the logs are"
            f" in {self._logs}"
        )
        return SystemExit(EXIT_FAILED)


def _words(settings: Mapping[str, object]) -> str:
    return "  ".join(f"{name} {str(value).lower()}" for name, value in settings.items())
