"""A DeepSpeed file as one layer of a step's settings, for every model that trains in it."""

import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipeline.config import TrainedModelConfig
from pipeline.config.deepspeed.read import read_deepspeed_config
from pipeline.config.schedules import SCHEDULES
from pipeline.errors import ConfigError
from pipeline.settings.build import Layer, typed_settings
from pipeline.settings.describe import section_class
from pipeline.settings.plain import Option

STEP_SETTINGS = ("batch_size", "micro_batch_size")
MODEL_SETTINGS = (
    "precision",
    *("optim.lr", "optim.betas", "optim.eps", "optim.weight_decay", "optim.warmup_steps"),
)
"""What "auto" may stand for, and `optim.max_grad_norm`."""


def deepspeed_layer(
    config_class: type,
    path: Path,
    *,
    world: int,
    layers: Sequence[Layer],
    overrides: Sequence[Option] = (),
    section: str = "",
) -> Layer:
    """The file's settings of a step.

    Each model that the step trains gets the same settings of its own; the batch sizes and trackers
    are the step's.

    Args:
        config_class: the step's settings.
        path: the DeepSpeed file.
        world: processes of the step.
        layers: all other settings, below and above this layer; "auto" takes what they come to.
        overrides: dotted names and their words from the command line, which "auto" takes as well.
        section: what a message puts before a setting's name, such as "sft.".

    Raises:
        ConfigError: the file can't be used, or nothing is trained here.
    """
    hints = typing.get_type_hints(config_class)
    trained = [
        field.name
        for field in fields(config_class)
        if section_class(hints[field.name]) is TrainedModelConfig
    ]
    if not trained:
        raise ConfigError(f"--zero-config {path}: no model is trained here")
    others = typed_settings(config_class, layers, overrides, section=section)
    read = {
        role: read_deepspeed_config(path, world=world, given=_given(others, role))
        for role in trained
    }
    models = {role: _nested(_whole(settings.model)) for role, settings in read.items()}
    return Layer({**models, **read[trained[0]].step}, str(path))


def _given(others: Mapping[str, Any], role: str) -> dict[str, Any]:
    """The values from which "auto" is resolved for the model `role`."""
    given = {name: others[name] for name in STEP_SETTINGS}
    given |= {name: others[f"{role}.{name}"] for name in MODEL_SETTINGS}
    # DeepSpeed's word for no clipping is 0.
    return {**given, "optim.max_grad_norm": others[f"{role}.optim.max_grad_norm"] or 0.0}


def _whole(model: Mapping[str, Any]) -> dict[str, Any]:
    """With what belongs to another optimizer or schedule emptied: a file names a whole one."""
    empty: dict[str, Any] = {}
    if "optim.name" in model:
        empty["optim.params"] = {}
    if "optim.schedule" in model:
        empty["optim.schedule_params"] = {}
        schedule = SCHEDULES[model["optim.schedule"]]
        if not schedule.has_warmup:
            empty["optim.warmup_steps"] = None
        if not schedule.has_final_ratio:
            empty["optim.final_lr_ratio"] = 0.0
    return {**empty, **model}


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"optim.lr": 1} as {"optim": {"lr": 1}}."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *sections, last = name.split(".")
        inner = nested
        for word in sections:
            inner = inner.setdefault(word, {})
        inner[last] = value
    return nested
