"""The file of the best settings: `python train.py --config FILE` runs with them."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from pipeline.budget.fixes import Settings, nested
from pipeline.config import EMBEDDED, StepConfig
from pipeline.installation import TRAIN
from pipeline.launch.deployment import Deployment
from pipeline.plan.request import CommandLine, Request
from pipeline.plan.resolve import step_configs
from pipeline.plan.stage import METHODS, Stage
from pipeline.settings.plain import flatten, plain


def write_best(
    file: Path,
    request: Request,
    stages: Sequence[Stage],
    configs: Mapping[str, StepConfig],
    tuned: Mapping[str, Settings],
) -> None:
    """Write settings that repeat the run of `request` with the steps' settings `configs`.

    It needs no other option: what came from files, a DeepSpeed file or the command line is in it,
    as far as it differs from what `train.py` does by itself.

    Args:
        file: receives them.
        request: the options of train.py.
        stages: the three steps.
        configs: the settings of each, by its name, with those that were tuned.
        tuned: the settings that were chosen, by the name of the step and their dotted names; they
            are written whatever they are.
    """
    document = _options(request, stages, configs)
    alone = _configs_alone(document, request, stages)
    for stage in stages:
        here, there = (flatten(plain(each[stage.name])) for each in (configs, alone))
        changed = {
            name: value
            for name, value in here.items()
            if name not in ("output_dir", *(["method"] if stage.method else []))
            and (name in tuned.get(stage.name, {}) or there.get(name, _Missing) != value)
        }
        if changed:
            of_methods = document if stage.method is None else document.setdefault(METHODS, {})
            of_methods[stage.method or stage.section] = nested(changed)
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    command = f"{TRAIN} {shlex.join(['--config', str(file)])}"
    partial.write_text(f"# Run it: {command}\n{text}", encoding="utf-8")
    partial.replace(file)


class _Missing:
    """Equals no setting."""


def _options(
    request: Request, stages: Sequence[Stage], configs: Mapping[str, StepConfig]
) -> dict[str, Any]:
    """Train.py's own options: which steps, where they run, from which model, into what."""
    names = ("step", *(each.name for each in fields(Deployment)))
    defaults = {each.name: each.default for each in fields(Request)}
    given = {name: getattr(request, name) for name in names}
    options = {name: value for name, value in given.items() if value != defaults[name]}
    if request.plan == "off":  # what auto chose is among the steps' settings
        options["plan"] = "off"
    if len(request.method) > 1:  # one alone is among the step's settings
        options["method"] = list(request.method)
    actor = str(plain(configs[stages[0].name])["model"]["path"])
    models = {} if actor == EMBEDDED else {"actor_model": actor}
    return {"output_dir": str(request.output_dir), **models, **plain(options)}


def _configs_alone(
    document: Mapping[str, Any], request: Request, stages: Sequence[Stage]
) -> Mapping[str, StepConfig]:
    """What train.py makes of those options alone."""
    model = document.get("actor_model")
    bare = replace(Request(), output_dir=request.output_dir, actor_model=model)
    return step_configs(
        CommandLine(bare, (), {stage.section: () for stage in stages}), stages, world=1
    )
