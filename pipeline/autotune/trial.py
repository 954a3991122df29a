"""A trial: a real run of a step over a few optimizer steps."""

import json
import shutil
import signal
import statistics
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from pipeline.budget.fixes import changed
from pipeline.cli import EXIT_INTERRUPTED, write_config
from pipeline.config import FrozenModelConfig, StepConfig
from pipeline.errors import EXIT_OUT_OF_MEMORY, EXIT_USER_ERROR
from pipeline.launch.child import run_child
from pipeline.launch.commands import step_command, step_environment
from pipeline.launch.local import PLANNED
from pipeline.plan.inputs import model_paths
from pipeline.plan.output import AUTOTUNE, MARK
from pipeline.plan.plan import Plan
from pipeline.plan.stage import Stage
from pipeline.signals import EXIT_REQUEUE, STOP_SIGNALS

MODELS = ".models"
"""Directory of what trials write: steps that start from a model of another one find it there."""

WARM_UP = 2
"""First optimizer steps, which allocate and compile; they are not measured."""

Outcome = Literal["measured", "out of memory", "refused", "failed"]


@dataclass(frozen=True)
class Trial:
    """The result of a trial."""

    outcome: Outcome

    speed: float = 0.0
    """Median of tokens per second over all processes; 0 where nothing was measured."""

    memory_gb: float = 0.0
    """Memory of the largest process."""

    message: str = ""
    """The last line of the log, where nothing was measured."""

    def __str__(self) -> str:
        if self.outcome == "measured":
            return f"{self.speed:,.0f} tokens/s, {self.memory_gb:.2f} GB"
        return f"{self.outcome}: {self.message}" if self.message else self.outcome


def run_trial(plan: Plan, stage: Stage, config: StepConfig, *, log: Path) -> Trial:
    """Run a step with these settings over a few optimizer steps.

    Raises:
        SystemExit: a scheduler's signal stopped it; the code is 75.
        KeyboardInterrupt: Ctrl-C stopped it.
    """
    out = plan.request.output_dir / AUTOTUNE / MODELS / stage.name
    shutil.rmtree(out, ignore_errors=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    steps = WARM_UP + plan.request.autotune_steps
    write_config(trial_settings(config, out, steps=steps, world=plan.machine.world), out / MARK)
    with log.open("wb") as output:
        ending = run_child(
            step_command(stage.module, out / MARK, plan.where, plan.request),
            {**step_environment(plan.where, plan.request), PLANNED: "1"},
            output=output,
        )
    if ending.code == EXIT_REQUEUE or ending.signal_received in STOP_SIGNALS:
        raise SystemExit(EXIT_REQUEUE)
    if ending.signal_received is not None or ending.code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt(f"interrupted while {stage.title} was tuned")
    lines = _read_metrics(out / "metrics.jsonl")[WARM_UP:]
    if ending.code == 0 and lines:
        return Trial(
            "measured",
            statistics.median(float(line["tokens_per_second"]) for line in lines),
            max(line.get("memory_gb", 0.0) for line in lines),
        )
    return Trial(_outcome(ending.code), message=_last_line(log))


def trial_settings(config: StepConfig, output_dir: Path, *, steps: int, world: int) -> StepConfig:
    """The settings for so many optimizer steps, with evaluations as short as possible."""
    values: dict[str, object] = {
        "output_dir": output_dir,
        "max_steps": steps,
        "eval_every": 0,
        "keep_best": False,
        "log_every": 1,
        "save_every": None,
        "resume": False,
        "trackers": (),
        "data.max_eval_rows": world,
    }
    of_some_steps: dict[str, object] = {
        "patience": None,
        "normalization_prompts": 2,
        "samples_every": steps + 1,
        "base": FrozenModelConfig(),
        "critic_warmup_steps": 0,
        "guards": (),
    }
    names = {each.name for each in fields(config)}
    return changed(config, values | {n: v for n, v in of_some_steps.items() if n in names})


def with_trial_models(config: StepConfig, plan: Plan) -> StepConfig:
    """The settings with models of trials in place of those of steps that have not run yet.

    The speed of a step depends on the shapes of its models alone.
    """
    made = {str(plan.request.output_dir / stage.name): stage.name for stage in plan.stages}
    models = plan.request.output_dir / AUTOTUNE / MODELS
    paths = {
        name: str(models / made[path])
        for name, path in model_paths(config)
        if path in made and not (Path(path) / "config.json").is_file()
    }
    return changed(config, paths)


def _outcome(code: int) -> Outcome:
    killed = (-signal.SIGKILL, 128 + signal.SIGKILL)
    if code == EXIT_OUT_OF_MEMORY or code in killed:
        return "out of memory"
    return "refused" if code == EXIT_USER_ERROR else "failed"


def _read_metrics(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if "tokens_per_second" in line]


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
