"""Models that learn: loaded, given their adapters, ready for the engine."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.config import EMBEDDED, LORA_RATE, FrozenModelConfig, StepConfig, TrainedModelConfig
from pipeline.demo.model import CONTEXT
from pipeline.models.chat import untrained_tokens
from pipeline.models.forward import base_model, context_length, positions
from pipeline.models.load import (
    add_tokens,
    lacks_tokens,
    load_causal_lm,
    load_classifier,
    model_path,
)
from pipeline.models.lora import Task, add_lora
from pipeline.models.quantized import quantized
from pipeline.parallel.device import local_device
from pipeline.system.errors import ConfigError, ModelError

logger = logging.getLogger(__name__)

LOW_RATE, LOW_FACTOR = 5e-5, 3.0
"""A rate of adapters below the one, and below the other times that of whole weights, is too low to
learn from: what works starts near 2e-5 in long runs and near 1e-4 in usual ones."""


def trained_causal_lm(
    config: TrainedModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device,
    seed: int,
    defer: bool = False,
) -> nn.Module:
    """The causal language model that a step trains, with adapters if the settings ask for them.

    With `defer`, at ZeRO stage 3 and where they are quantized, its weights stay on the CPU until an
    engine takes its shard (`load_causal_lm`).
    """
    model = load_causal_lm(config, device=device, seed=seed, defer=defer or _defers(config))
    _give_rows(model, tokenizer, config, seed=seed)
    if config.lora is None:
        return prepared(model, config)
    say_rate(config)
    return prepared(adapted(model, config, task="causal", seed=seed), config)


def trained_classifier(
    config: TrainedModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device,
    seed: int,
    num_labels: int = 1,
    defer: bool = False,
) -> nn.Module:
    """The reward model or critic that a step trains, with adapters if the settings ask for them.

    With `defer`, at ZeRO stage 3 and where they are quantized, its weights stay on the CPU until an
    engine takes its shard (`load_causal_lm`).
    """
    defer = defer or _defers(config)
    model = load_classifier(config, device=device, seed=seed, defer=defer, num_labels=num_labels)
    _give_rows(model, tokenizer, config, seed=seed)
    if config.lora is None:
        return prepared(model, config)
    say_rate(config)
    return prepared(adapted(model, config, task="classifier", seed=seed), config)


def adapted(
    model: PreTrainedModel, config: TrainedModelConfig, *, task: Task, seed: int
) -> PeftModel:
    """The model with adapters, its base quantized if the settings ask for it."""
    assert config.lora is not None
    model_with_adapters = add_lora(model, config.lora, task=task, seed=seed)
    _quantize(model_with_adapters, config)
    return model_with_adapters


def say_rate(config: TrainedModelConfig) -> None:
    """Log the learning rate of the adapters, where it was chosen, or is likely a mistake."""
    assert config.lora is not None
    rate, whole = config.lora_lr, config.optim.lr
    if config.lora.lr is None:
        logger.info(
            "adapters on %s train at a rate of %g, %g times optim.lr; lora.lr sets another",
            config.path,
            rate,
            LORA_RATE,
        )
    elif rate < min(LOW_RATE, LOW_FACTOR * whole):
        logger.warning(
            "lora.lr %g is a rate for whole weights, at which adapters on %s hardly learn: they"
            " need about %g times as much (%g)",
            rate,
            config.path,
            LORA_RATE,
            LORA_RATE * whole,
        )


def _quantize(model: nn.Module, config: TrainedModelConfig) -> None:
    """Have the base in 4 or 8 bits, if the settings ask for it; log how much that saves."""
    if config.quantize == "none":
        return
    before = frozen_bytes(model)
    quantized(model, config, device=local_device())
    logger.info(
        "%s: the linear weights of the blocks are stored as %s; all frozen weights take %.1f MB"
        " instead of %.1f MB",
        config.path,
        config.quantize,
        frozen_bytes(model) / 1e6,
        before / 1e6,
    )


def frozen_bytes(model: nn.Module) -> int:
    """Bytes of the weights that don't learn, as they are stored."""
    return sum(param.nbytes for param in model.parameters() if not param.requires_grad)


def _defers(config: TrainedModelConfig) -> bool:
    """True if the weights are not moved to the device before an engine takes its shard."""
    return config.zero_stage == 3 or config.quantize != "none"


def _give_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainedModelConfig,
    *,
    seed: int,
) -> None:
    """Embeddings for tokens of the tokenizer that the model has none for.

    Raises:
        ConfigError: LoRA would leave them as random as they are drawn.
    """
    if config.lora is not None and lacks_tokens(model, tokenizer):
        raise ConfigError(untrained_tokens(config))
    add_tokens(model, tokenizer, seed=seed)


def prepared(model: nn.Module, config: TrainedModelConfig) -> nn.Module:
    """The model in training mode, recomputing the activations of the blocks that are listed."""
    plain: PreTrainedModel = base_model(model)
    if config.gradient_checkpointing:
        # Its name before transformers 5.23 was gradient_checkpointing_enable.
        enable = getattr(plain, "activation_checkpointing_enable", None)
        (enable or plain.gradient_checkpointing_enable)({"use_reentrant": False})
        blocks = [each for each in plain.modules() if isinstance(each, GradientCheckpointingLayer)]
        for number, block in enumerate(blocks):
            block.gradient_checkpointing = number % config.checkpoint_every == 0
    plain.config.use_cache = True  # for the exported model; training passes its own flag
    return model.train()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients: no checkpointing, no adapter dropout."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


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
