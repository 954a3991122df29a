"""How long a model reads, and settings whose rows are no longer."""

from dataclasses import replace
from typing import TypeVar

from torch import nn
from transformers import AutoConfig

from pipeline.config import EMBEDDED, FrozenModelConfig, StepConfig
from pipeline.demo.model import CONTEXT
from pipeline.errors import ModelError
from pipeline.models.forward import base_model, context_length, positions
from pipeline.models.load import model_path

StepT = TypeVar("StepT", bound=StepConfig)


def context_of(config: FrozenModelConfig) -> int:
    """Tokens that the model's position encoding covers, as `context_length` of the loaded one.

    Raises:
        ModelError: its configuration can't be read.
    """
    path = model_path(config)
    if path == EMBEDDED:
        return CONTEXT
    try:
        settings = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} has no configuration that can be read: {error}") from error
    return positions(settings)


def within_context(config: StepT, model: nn.Module) -> StepT:
    """The settings with `data.max_length` no longer than what the model reads."""
    return _within(config, context_length(base_model(model)))


def within_context_of(config: StepT, model: FrozenModelConfig) -> StepT:
    """As `within_context`, before the model is loaded.

    Raises:
        ModelError: its configuration can't be read.
    """
    return _within(config, context_of(model))


def _within(config: StepT, limit: int) -> StepT:
    return replace(config, data=replace(config.data, max_length=min(config.data.max_length, limit)))
