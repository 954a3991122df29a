"""Autotuning as `train.py --autotune` does it, step by step.

OUT/autotune/trials.jsonl     every trial, as soon as it has ended
OUT/autotune/logs/            what each of them wrote
OUT/autotune/best.yaml        the best settings of the steps tuned so far

While trials run, .trial and .models have what they make.
"""

import shlex
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pipeline.autotune.best import write_best
from pipeline.autotune.space import Value, known_dimensions
from pipeline.autotune.tuning import LOGS, TRIALS, Tuning
from pipeline.autotune.warmup_checkpoints import make_warmup_checkpoint, warmup_checkpoints
from pipeline.cli import say
from pipeline.errors import ConfigError, suggestion
from pipeline.installation import TRAIN
from pipeline.plan.output import AUTOTUNE
from pipeline.plan.plan import Plan

BEST = "best.yaml"
MADE = (TRIALS, f"{BEST}*", f"{LOGS}/step*_*-*.log")
"""Names of the files that a tuning makes."""


def tune(plan: Plan) -> Plan:
    """The plan with the best settings that trials found for each of its steps.

    All machines of a job are taken to be like this one.

    Raises:
        ConfigError: `--autotune-space` can't be used, nothing fits, or a step finds its input
            wrong.
        SystemExit: no candidate of a step could be measured, or a scheduler stopped the trials.
        KeyboardInterrupt: Ctrl-C did.
    """
    out = plan.request.output_dir / AUTOTUNE
    _check_space(plan)
    if plan.request.overwrite and out.is_dir():
        _clear(out)
    stages = [stage for stage in plan.stages if stage.name not in plan.finished]
    chosen: dict[str, Mapping[str, Value]] = {}
    try:
        for stage in plan.stages:
            tuning = Tuning(plan, stage)
            best = tuning.best() if stage in stages else tuning.best_known()
            if best is None:  # it was made without
                continue
            plan = tuning.plan_with(best)
            chosen[stage.name] = tuning.space.settings(best)
            if stage not in stages:
                continue
            write_best(out / BEST, plan.request, plan.all_stages, plan.configs, chosen)
            if any(later.number > stage.number for later in stages):
                make_warmup_checkpoint(plan, stage)
    finally:
        shutil.rmtree(warmup_checkpoints(plan), ignore_errors=True)
    command = shlex.join(["--config", str(out / BEST)])
    say(f"the best settings: {out / BEST}; `{TRAIN} {command}` runs with them")
    return plan


def _clear(out: Path) -> None:
    """Remove what an earlier tuning left, and nothing else."""
    for pattern in MADE:
        for file in out.glob(pattern):
            file.unlink()
    for directory in (out / LOGS, out):
        with suppress(OSError):  # it is not there, or not empty
            directory.rmdir()


def _check_space(plan: Plan) -> None:
    """Raise unless each name of `--autotune-space` is a setting of some step that is tuned."""
    names = [known_dimensions(plan.configs[stage.name]) for stage in plan.stages]
    known = dict.fromkeys(name for each in names for name in each)
    for name in plan.request.autotune_space:
        if name not in known:
            raise ConfigError(
                f"--autotune-space {name} is not a setting of memory and speed;"
                f" {suggestion(name, known)}"
            )
