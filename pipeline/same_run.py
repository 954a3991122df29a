"""Whether a run would go on from a checkpoint as if it had not been interrupted."""

from collections.abc import Mapping
from typing import Any

from pipeline.config import StepConfig, affects_result
from pipeline.engine.checkpoint.checkpoint import Checkpoint
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
        if there != here:
            raise ConfigError(
                f"{checkpoint.path} was made with {name} {there}, and this run has {here};"
                " keep that setting, or pass --overwrite to start again"
            )
    if state["data"] != data:
        raise ConfigError(
            f"the training rows are not those of {checkpoint.path}: the data has changed;"
            " restore it, or pass --overwrite to start again"
        )


def _deciding(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if affects_result(name)}
