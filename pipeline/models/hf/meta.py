"""Models on the meta device, for memory estimates or later loading."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from pipeline.config import EMBEDDED, FrozenModelConfig, TrainedModelConfig
from pipeline.demo.model import build_model, build_tokenizer
from pipeline.models.adapters.lora import Task, add_lora
from pipeline.models.adapters.quantized import quantized
from pipeline.models.hf.known import KNOWN
from pipeline.models.hf.load import errors_only, switch_off_dropout, weight_dtype
from pipeline.system.errors import ModelError

ModelT = TypeVar("ModelT", bound=PreTrainedModel)


def meta_model(build: Callable[[], ModelT]) -> ModelT:
    """The model that `build` makes of a config, with parameters on the meta device.

    Buffers, such as the frequencies of rotary embeddings, are computed. Tied parameters are one
    object, and those that a family keeps in fp32 are fp32, as after `from_pretrained`.
    """
    with init_empty_weights(include_buffers=False):
        model = build()
    model.tie_weights()  # each name got a separate empty tensor
    kept = model._get_dtype_plan(model.dtype)  # noqa: SLF001  # from_pretrained calls it too
    if kept:
        pattern = re.compile("|".join(kept).replace("*", ".*"))
        for name, param in model.named_parameters():
            if pattern.search(name):
                param.data = param.data.float()
    return model


def places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Every occurrence of a parameter: full name, module, local name, parameter."""
    for prefix, module in list(model.named_modules()):
        for leaf, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            yield f"{prefix}.{leaf}" if prefix else leaf, module, leaf, param


def model_on_meta(config: FrozenModelConfig, *, task: Task, device: torch.device) -> nn.Module:
    """The model of a step with its adapters, on the meta device instead of `device`.

    Only its configuration is read; for a name in `KNOWN` that is no local path, it is taken from
    there. The model has no dropout, and no rows that a chat format adds to the embeddings.

    Raises:
        ModelError: there is no configuration, or it is of another kind of model.
    """
    path = str(config.path)
    auto = AutoModelForCausalLM if task == "causal" else AutoModelForSequenceClassification
    trust = config.trust_remote_code
    try:
        with errors_only(), torch.device("meta"):
            settings = _settings(path, trust_remote_code=trust)
            switch_off_dropout(settings)
            settings.num_labels = 1
            dtype = weight_dtype(config.precision, device)
            model = auto.from_config(settings, dtype=dtype, trust_remote_code=trust)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"the model {path} has no readable configuration ({reason})") from None
    if isinstance(config, TrainedModelConfig):
        if config.lora is None:
            return model
        return quantized(add_lora(model, config.lora, task=task, seed=0), config)
    return quantized(model.requires_grad_(False), config)


def _settings(path: str, *, trust_remote_code: bool) -> PreTrainedConfig:
    if path == EMBEDDED:
        return build_model(vocab_size=len(build_tokenizer()), seed=0).config
    if path in KNOWN and not Path(path).exists():
        return AutoConfig.for_model(**KNOWN[path])
    return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
