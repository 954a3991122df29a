"""Models for trials to start from, where the step that makes them has not been run.

How fast a step is depends on the shapes of its models, not on what they have learned: one step of
the step before is enough.
"""

from dataclasses import replace
from pathlib import Path

from pipeline.autotune.trial import trial_settings
from pipeline.budget.fallbacks import changed
from pipeline.cli import EXIT_INTERRUPTED, complain, say, write_config
from pipeline.config import StepConfig
from pipeline.errors import EXIT_FAILED, EXIT_USER_ERROR
from pipeline.launch.child import run_child
from pipeline.launch.commands import step_command, step_environment
from pipeline.launch.local import PLANNED
from pipeline.plan.inputs import model_paths
from pipeline.plan.output import AUTOTUNE, MARK
from pipeline.plan.plan import Plan
from pipeline.plan.stage import Stage
from pipeline.signals import EXIT_REQUEUE, STOP_SIGNALS


def make_warmup_checkpoint(plan: Plan, stage: Stage) -> None:
    """Have a model of this step, if only of its first step, for those that start from it.

    Raises:
        SystemExit: the step failed; 2 where it found wrong input, 75 where a scheduler stopped it.
        KeyboardInterrupt: Ctrl-C did.
    """
    if _is_model(plan.request.output_dir / stage.name):
        return
    out = warmup_checkpoints(plan) / stage.name
    config = trial_settings(
        from_warmup_checkpoints(plan.configs[stage.name], plan),
        out,
        steps=1,
        world=plan.processes or 1,
    )
    write_config(replace(config, max_steps=1), out / MARK)
    say(f"step {stage.number}: one step, for a model that the next one's trials start from")
    ending = run_child(
        step_command(stage.module, out / MARK, plan.where, plan.request),
        {**step_environment(plan.where, plan.request), PLANNED: "1"},
    )
    if ending.code == EXIT_REQUEUE or ending.signal_received in STOP_SIGNALS:
        raise SystemExit(EXIT_REQUEUE)
    if ending.signal_received is not None or ending.code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt("interrupted; the trials are kept, and the same command goes on")
    if ending.code == EXIT_USER_ERROR:  # the step has printed what is wrong
        raise SystemExit(EXIT_USER_ERROR)
    if ending.code:
        complain(
            f"step {stage.number} failed with its best settings (exit code {ending.code}), after"
            " its trials; what it needs at its end may not fit"
        )
        raise SystemExit(EXIT_FAILED)


def warmup_checkpoints(plan: Plan) -> Path:
    """The directory of these models."""
    return plan.request.output_dir / AUTOTUNE / ".models"


def from_warmup_checkpoints(config: StepConfig, plan: Plan) -> StepConfig:
    """The settings with models of the warm-up in place of those that are not made yet."""
    made = {str(plan.request.output_dir / stage.name): stage.name for stage in plan.stages}
    paths = {
        name: str(warmup_checkpoints(plan) / made[path])
        for name, path in model_paths(config)
        if path in made and not _is_model(Path(path))
    }
    return changed(config, paths)


def _is_model(directory: Path) -> bool:
    return (directory / "config.json").is_file()
