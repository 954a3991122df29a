"""Models for training: loaded, with adapters, ready for the engine."""

import logging
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from pipeline.config import EMBEDDED, FrozenModelConfig, StepConfig, TrainedModelConfig
from pipeline.demo.model import CONTEXT
from pipeline.models.adapters.lora import Task, add_lora
from pipeline.models.adapters.quantized import quantize_model
from pipeline.models.forward.forward import max_positions
from pipeline.models.hf.load import (
    add_tokens,
    load_causal_lm,
    load_classifier,
    model_path,
    tokens_without_rows,
)
from pipeline.parallel.device import local_device
from pipeline.system.errors import ConfigError, ModelError

logger = logging.getLogger(__name__)


def prepare_causal_lm(
    config: TrainedModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device,
    seed: int,
) -> nn.Module:
    """Load the causal language model that a step trains, with adapters if they are configured.

    Its weights stay on the CPU until an engine moves its shard to the device.

    Raises:
        ConfigError: LoRA would leave new rows of the embeddings untrained.
    """
    model = load_causal_lm(config, device=device, seed=seed, defer=True)
    return _prepare_model(model, tokenizer, config, task="causal", seed=seed)


def prepare_classifier(
    config: TrainedModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device,
    seed: int,
    num_labels: int = 1,
) -> nn.Module:
    """Load the reward model or critic that a step trains; see `prepare_causal_lm`."""
    model = load_classifier(config, device=device, seed=seed, defer=True, num_labels=num_labels)
    return _prepare_model(model, tokenizer, config, task="classifier", seed=seed)


def _prepare_model(
    plain: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainedModelConfig,
    *,
    task: Task,
    seed: int,
) -> nn.Module:
    """Add token rows, adapters, quantization and gradient checkpointing; set training mode."""
    if config.lora is not None and (tokens := tokens_without_rows(plain, tokenizer)):
        raise ConfigError(
            f"{config.path} has no embeddings for {', '.join(map(repr, tokens[:3]))} of the"
            " tokenizer, and LoRA would leave new ones untrained; set lora to null, or remove these"
            f" tokens from the tokenizer (its pad_token can be {tokenizer.eos_token!r})"
        )
    add_tokens(plain, tokenizer, seed=seed)
    model: nn.Module = plain
    if config.lora is not None:
        model = add_lora(plain, config.lora, task=task, seed=seed)
    if config.quantize != "none":
        quantize_model(model, config, device=local_device())
        num_bytes = sum(param.nbytes for param in model.parameters() if not param.requires_grad)
        logger.info(
            "%s: the linear weights of the blocks are stored as %s; frozen weights take %.1f MB",
            config.path,
            config.quantize,
            num_bytes / 1e6,
        )
    if config.gradient_checkpointing:
        # Before transformers 5.23, it was called gradient_checkpointing_enable.
        enable = getattr(plain, "activation_checkpointing_enable", None)
        (enable or plain.gradient_checkpointing_enable)({"use_reentrant": False})
    plain.config.use_cache = True  # for the exported model; training passes use_cache=False
    return model.train()


StepT = TypeVar("StepT", bound=StepConfig)


def get_context(config: FrozenModelConfig) -> int:
    """Return the maximum length of the model's position encoding, read from its configuration.

    Raises:
        ModelError: the model's configuration can't be read.
    """
    path = model_path(config)
    if path == EMBEDDED:
        return CONTEXT
    try:
        settings = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} has no readable configuration: {error}") from error
    return max_positions(settings)


def limit_to_context(config: StepT, model: FrozenModelConfig) -> StepT:
    """Return the settings with `data.max_length` limited to the model's context length.

    Raises:
        ModelError: the model's configuration can't be read.
    """
    length = min(config.data.max_length, get_context(model))
    return replace(config, data=replace(config.data, max_length=length))
