"""Whether a run would go on from a checkpoint as if it had not been interrupted."""

from collections.abc import Mapping
from typing import Any

from pipeline.config import LENGTH, StepConfig, affects_result
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.engine import Engine
from pipeline.engine.lr import goes_on_alike, length_dependence
from pipeline.errors import ConfigError
from pipeline.settings.plain import plain, portable, with_defaults


def deciding_settings(config: StepConfig) -> dict[str, Any]:
    """The settings that affect a run's result, by dotted name: they must not change."""
    return _deciding(portable(plain(config)))


def check_same_run(checkpoint: Checkpoint, config: StepConfig, data: str) -> None:
    """Raise if a run with these settings and that fingerprint of its data is another one.

    Raises:
        ConfigError: a setting that affects the result has changed, or the data has.
    """
    state, settings = checkpoint.state, deciding_settings(config)
    theirs = _deciding(with_defaults(state["settings"], config))
    for name in sorted(theirs.keys() | settings.keys()):
        there, here = theirs.get(name), settings.get(name)
        if there != here and name not in LENGTH:
            raise ConfigError(
                f"{checkpoint.path} was made with {name} {there}, and this run has {here};"
                " keep that setting, or pass --overwrite to start again"
            )
    if state["data"] != data:
        raise ConfigError(
            f"the training rows are not those of {checkpoint.path}: the data has changed;"
            " restore it, or pass --overwrite to start again"
        )


def check_length(checkpoint: Checkpoint, engines: Mapping[str, Engine], total_steps: int) -> None:
    """Raise unless its steps are those with which a run as long as this one begins.

    Args:
        checkpoint: to go on from.
        engines: of the models that learn, by name.
        total_steps: of this run.

    Raises:
        ConfigError: it has taken more steps already, or its learning rates were others.
    """
    there = int(checkpoint.state["total_steps"])
    if there == total_steps:
        return
    ends = f"{checkpoint.path} is of a run of {there} steps, and this one has {total_steps}"
    hint = "keep max_steps and epochs, or pass --overwrite to start again"
    if total_steps < checkpoint.step:
        raise ConfigError(f"{ends}, of which {checkpoint.step} are done already; {hint}")
    for name, engine in engines.items():
        # In step 3 an iteration has several optimizer steps.
        before = max(1, engine.total_steps * there // total_steps)
        if not goes_on_alike(before, engine.total_steps, optim=engine.optim):
            raise ConfigError(
                f"{ends}, and its learning rates depend on that: {name}."
                f"{length_dependence(engine.optim)}; {hint}. A run can be made longer whose"
                " schedule has no end, such as constant, and whose warmup_steps are set"
            )


def _deciding(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if affects_result(name)}
