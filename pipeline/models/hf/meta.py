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
from pipeline.models.adapters.quantized import quantize_model
from pipeline.models.hf.directory import require_unquantized
from pipeline.models.hf.known import KNOWN_CONFIGS
from pipeline.models.hf.load import disable_dropout, suppress_transformers_warnings, weight_dtype
from pipeline.system.errors import ModelError

ModelT = TypeVar("ModelT", bound=PreTrainedModel)


def build_on_meta(build: Callable[[], ModelT]) -> ModelT:
    """Build a model from its configuration, with the parameters on the meta device.

    Buffers, such as the frequencies of rotary embeddings, are computed. As after `from_pretrained`,
    tied parameters are one object, and parameters that the family keeps in fp32 are fp32.
    """
    with init_empty_weights(include_buffers=False):
        model = build()
    model.tie_weights()  # each name got a separate empty tensor
    fp32_patterns = model._get_dtype_plan(model.dtype)  # noqa: SLF001  # from_pretrained calls it too
    if fp32_patterns:
        pattern = re.compile("|".join(fp32_patterns).replace("*", ".*"))
        for name, param in model.named_parameters():
            if pattern.search(name):
                param.data = param.data.float()
    return model


def iter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield (full name, module, name in the module, parameter) for each use of a parameter."""
    for prefix, module in list(model.named_modules()):
        for leaf, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            yield f"{prefix}.{leaf}" if prefix else leaf, module, leaf, param


def load_on_meta(config: FrozenModelConfig, *, task: Task, device: torch.device) -> nn.Module:
    """Build a model with its adapters on the meta device, as it would be loaded on `device`.

    Only its configuration is read, or taken from `KNOWN_CONFIGS` if that contains the name and no
    such path exists. The model has no dropout, and no embedding rows for tokens of a chat format.

    Raises:
        ModelError: the configuration is missing, unsupported, or for a different kind of model.
    """
    path = str(config.path)
    auto = AutoModelForCausalLM if task == "causal" else AutoModelForSequenceClassification
    trust_remote_code = config.trust_remote_code
    try:
        with suppress_transformers_warnings(), torch.device("meta"):
            settings = _load_settings(path, trust_remote_code=trust_remote_code)
            disable_dropout(settings)
            settings.num_labels = 1
            dtype = weight_dtype(config.precision, device)
            model = auto.from_config(settings, dtype=dtype, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"the model {path} has no readable configuration ({reason})") from None
    require_unquantized(path, getattr(settings, "quantization_config", None))
    if not isinstance(config, TrainedModelConfig):
        return quantize_model(model.requires_grad_(False), config)
    if config.lora is None:
        return model
    with torch.device("meta"):  # draws no values
        return quantize_model(add_lora(model, config.lora, task=task, seed=0), config)


def _load_settings(path: str, *, trust_remote_code: bool) -> PreTrainedConfig:
    if path == EMBEDDED:
        return build_model(vocab_size=len(build_tokenizer()), seed=0).config
    if path in KNOWN_CONFIGS and not Path(path).exists():
        return AutoConfig.for_model(**KNOWN_CONFIGS[path])
    return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
