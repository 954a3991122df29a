"""Autotune a plan: run short trials of each step with varied settings, and keep the fastest.

The micro-batch is doubled, or else halved, while that is faster; then gradient checkpointing is
switched on or off, and the other ZeRO stages are tried. Settings given by the user are kept. A
trial is a real run of a step for a few optimizer steps.

OUT/autotune/trials.jsonl     a line for each trial
OUT/autotune/logs/            the output of the trials
"""

import json
import shutil
import signal
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from pipeline.budget.fit import (
    Settings,
    find_shortage,
    for_models,
    replace_settings,
    trained_models,
)
from pipeline.budget.memory import step_memory
from pipeline.cli.options import print_error, print_output, write_config
from pipeline.config import FrozenModelConfig, StepConfig
from pipeline.launch.child import run_child
from pipeline.launch.commands import step_command, step_environment
from pipeline.launch.local import PLANNED
from pipeline.plan.inputs import model_paths
from pipeline.plan.output import AUTOTUNE, MARK, METRICS
from pipeline.plan.plan import Plan
from pipeline.plan.stage import Stage
from pipeline.system.errors import EXIT_FAILED, EXIT_OUT_OF_MEMORY, EXIT_USER_ERROR, ConfigError
from pipeline.system.signals import EXIT_INTERRUPTED, EXIT_REQUEUE, STOP_SIGNALS

TRIALS, LOGS = "trials.jsonl", "logs"

MODELS = ".models"
"""Directory of the outputs of trials, from which later steps take their models."""

MIN_SPEEDUP = 1.03
"""A change is kept if the step is faster by this factor; single steps vary by a few percent."""

WARM_UP = 2
"""Number of initial optimizer steps of a trial that are not timed: they allocate and compile."""


def tune(plan: Plan) -> Plan:
    """Return the plan with the fastest settings that trials found for each unfinished step.

    Raises:
        ConfigError: a step rejects its input, or fits in memory with none of the settings tried.
        SystemExit: no trial of a step could be measured, or a scheduler stopped the trials.
        KeyboardInterrupt: Ctrl-C stopped the trials.
    """
    out = plan.request.output_dir / AUTOTUNE
    out.mkdir(parents=True, exist_ok=True)
    (out / TRIALS).unlink(missing_ok=True)
    options: list[str] = []
    try:
        for stage in plan.unfinished:
            best = _StepTuner(plan, stage).run()
            config = replace_settings(plan.configs[stage.name], best)
            plan = replace(plan, configs={**plan.configs, stage.name: config})
            options += [
                f"--{stage.prefix}.{name} {str(value).lower()}" for name, value in best.items()
            ]
    finally:
        shutil.rmtree(out / MODELS, ignore_errors=True)
    print_output(f"the fastest settings: {' '.join(options) or 'those of the command'}")
    return plan


class _StepTuner:
    """Runs the tuning trials of one step and selects the fastest settings."""

    def __init__(self, plan: Plan, stage: Stage) -> None:
        self.plan, self.stage = plan, stage
        self._config = plan.configs[stage.name]
        self._user_settings = plan.user_settings[stage.name]
        self._out = plan.request.output_dir / AUTOTUNE
        self.trials = 0
        self.first_speed = 0.0
        """Tokens per second of the first successful trial."""

    def run(self) -> Settings:
        """Return the settings of the fastest trial."""
        print_output(f"step {self.stage.number}: tuning {self.stage.name}")
        best, speed = self._best_micro_batch({}, self._measure({}))
        for settings in self._alternatives():
            combined = {**best, **settings}
            new_speed = self._measure(combined)
            if new_speed > MIN_SPEEDUP * speed:
                best, speed = self._best_micro_batch(combined, new_speed)
        if not self.trials:
            raise ConfigError(
                f"{self.stage.title} doesn't fit in memory with any settings tried; see --dry-run"
            )
        if not speed:
            print_error(
                f"no trial of step {self.stage.number} could be measured ({self.trials} tried); see"
                f" the logs in {self._out / LOGS}"
            )
            raise SystemExit(EXIT_FAILED)
        print_output(
            f"{self.stage.title} is fastest with {_describe(best) or 'unchanged settings'}:"
            f" {speed / self.first_speed:.2f} times the speed of the first trial"
        )
        return best

    def _best_micro_batch(self, settings: Settings, speed: float) -> tuple[Settings, float]:
        """Return the settings with the fastest micro-batch, and their speed.

        `speed` is the speed of `settings`. The size is doubled while that is faster, else halved.
        """
        if "micro_batch_size" in self._user_settings:
            return settings, speed
        base = replace_settings(self._config, settings)
        max_size = -(-base.batch_size // base.workload(self.plan.machine.world).data_processes)
        best, best_speed = settings, speed
        for factor in (2, 0.5):
            size = base.micro_batch_size
            while size * factor >= 1 and (factor < 1 or size < max_size):
                size = int(size * factor)
                candidate = {**settings, "micro_batch_size": size}
                new_speed = self._measure(candidate)
                if new_speed < MIN_SPEEDUP * best_speed:
                    break
                if new_speed:
                    best, best_speed = candidate, new_speed
            if best_speed > speed:
                break
        return best, best_speed

    def _alternatives(self) -> Iterator[Settings]:
        """Yield settings that toggle gradient checkpointing, or use a different ZeRO stage."""
        (model, *_) = trained_models(self._config).values()
        options: list[Settings] = [{"gradient_checkpointing": not model.gradient_checkpointing}]
        if self._config.workload(self.plan.machine.world).shards > 1:
            options += [{"zero_stage": stage} for stage in range(4) if stage != model.zero_stage]
        for option in options:
            settings = for_models(self._config, option)
            if not self._user_settings & settings.keys():
                yield settings

    def _measure(self, settings: Settings) -> float:
        """Return a trial's tokens per second, or 0 if it failed or its settings can't be used.

        Raises:
            ConfigError: in the first trial, the step rejects its input.
            SystemExit: a scheduler's signal stopped the trial; the code is 75.
            KeyboardInterrupt: Ctrl-C stopped the trial.
        """
        machine, checks_memory = self.plan.machine, self.plan.request.plan != "off"
        try:
            config = with_trial_models(replace_settings(self._config, settings), self.plan)
            config.check_processes(machine.world)
        except ConfigError:
            return 0.0
        if checks_memory and find_shortage(step_memory(config, machine=machine), machine):
            return 0.0
        self.trials += 1
        log = self._out / LOGS / f"{self.stage.name}-{self.trials:03}.log"
        code, lines = self._run(config, log)
        speeds = [float(line["tokens_per_second"]) for line in lines]
        speed = statistics.median(speeds) if code == 0 and speeds else 0.0
        outcome, detail = "measured", f"{speed:,.0f} tokens/s"
        if not speed:
            text = log.read_text(encoding="utf-8", errors="replace").strip()
            message = text.splitlines()[-1] if text else f"exit code {code}"
            if code == EXIT_USER_ERROR and self.trials == 1:
                raise ConfigError(message.removeprefix("error: "))
            memory_ran_out = code in (EXIT_OUT_OF_MEMORY, -signal.SIGKILL, 128 + signal.SIGKILL)
            outcome = "out of memory" if memory_ran_out else "failed"
            detail = f"{outcome}: {message}"
        self.first_speed = self.first_speed or speed
        record = {
            "step": self.stage.name,
            "settings": dict(settings),
            "outcome": outcome,
            "speed": speed,
            "memory_gb": max((line.get("memory_gb", 0.0) for line in lines), default=0.0),
        }
        with (self._out / TRIALS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print_output(f"  trial {self.trials}   {_describe(settings) or 'unchanged'}   {detail}")
        return speed

    def _run(self, config: StepConfig, log: Path) -> tuple[int, list[dict[str, Any]]]:
        """Run the step for a few optimizer steps; return the exit code and the lines of metrics."""
        plan, out = self.plan, self._out / MODELS / self.stage.name
        shutil.rmtree(out, ignore_errors=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        steps = WARM_UP + plan.request.autotune_steps
        write_config(trial_settings(config, out, steps=steps, world=plan.machine.world), out / MARK)
        with log.open("wb") as output:
            result = run_child(
                step_command(self.stage.module, out / MARK, plan.layout, plan.request),
                {**step_environment(plan.layout, plan.request), PLANNED: "1"},
                output=output,
            )
        if result.code == EXIT_REQUEUE or result.signal_received in STOP_SIGNALS:
            raise SystemExit(EXIT_REQUEUE)
        if result.signal_received is not None or result.code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt(f"interrupted while tuning {self.stage.title}")
        file = out / METRICS
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        lines = [json.loads(line) for line in text.splitlines()]
        return result.code, [line for line in lines if "tokens_per_second" in line][WARM_UP:]


def _describe(settings: Mapping[str, object]) -> str:
    return "  ".join(f"{name} {str(value).lower()}" for name, value in settings.items())


def trial_settings(config: StepConfig, output_dir: Path, *, steps: int, world: int) -> StepConfig:
    """Return the settings for `steps` optimizer steps, with evaluations as short as possible."""
    values: dict[str, object] = {"output_dir": output_dir, "max_steps": steps, "resume": False}
    values |= {"eval_every": 0, "keep_best": False, "data.max_eval_rows": world}
    values |= {"log_every": 1, "save_every": None, "trackers": ()}
    optional: dict[str, object] = {"patience": None, "guards": ()}
    optional |= {"samples_every": steps + 1, "base": FrozenModelConfig()}
    names = {setting.name for setting in fields(config)}
    return replace_settings(config, values | {n: v for n, v in optional.items() if n in names})


def with_trial_models(config: StepConfig, plan: Plan) -> StepConfig:
    """Return the settings with substitutes for models of steps that have not run yet.

    The speed of a step depends only on the shapes of its models.
    """
    stage_by_path = {str(plan.request.output_dir / stage.name): stage.name for stage in plan.stages}
    models = plan.request.output_dir / AUTOTUNE / MODELS
    paths = {
        name: str(models / stage_by_path[path])
        for name, path in model_paths(config)
        if path in stage_by_path and not (Path(path) / "config.json").is_file()
    }
    return replace_settings(config, paths)
