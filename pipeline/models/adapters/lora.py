"""LoRA through peft: adapters on the linear layers; heads are trained in full."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from jaxtyping import Float
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, TaskType, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pipeline.config import LoraConfig
from pipeline.models.adapters.quantized import CODES, SCALES, QuantizedLinear
from pipeline.system.errors import ConfigError

HEADS = ("score", "classifier", "pre_classifier", "pooler")
"""Module names of classifier heads; an encoder may have several of these modules."""

Task = Literal["causal", "classifier"]
"""Output of a model: the next token, or a score."""


@contextmanager
def suppress_peft_warnings() -> Iterator[None]:
    """Suppress peft's warnings about tied layers and adapted embeddings, which don't apply."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="peft")
        # peft calls a deprecated method to enable gradient checkpointing.
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        yield


def add_lora(model: PreTrainedModel, config: LoraConfig, *, task: Task, seed: int) -> PeftModel:
    """Freeze `model` and add fp32 adapters; a classifier's head remains trainable.

    The adapters' random matrices are drawn from `seed`, the same on every process.

    Raises:
        ConfigError: no module matches `lora.targets`.
    """
    all_linear = config.targets == ("all-linear",)
    module_names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    heads = [name for name in HEADS if name in module_names]
    peft_config = PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # peft accepts floats  # pyrefly: ignore[bad-argument-type]
        use_rslora=config.variant == "rslora",
        lora_dropout=config.dropout,
        target_modules="all-linear" if all_linear else list(config.targets),
        modules_to_save=heads if task == "classifier" else None,
        # GPT-2's layers store their weights transposed.
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type=TaskType.SEQ_CLS if task == "classifier" else TaskType.CAUSAL_LM,
    )
    with torch.random.fork_rng(devices=[]), suppress_peft_warnings():
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed GPUs
        try:
            peft_model = get_peft_model(model, peft_config)
        except ValueError as error:
            raise ConfigError(f"lora.targets {list(config.targets)}: {error}") from error
    for name, param in peft_model.named_parameters():
        if ".lora_" in name:
            param.data = param.data.float()
    adapter_config = peft_model.peft_config["default"]
    assert isinstance(adapter_config, PeftLoraConfig)
    # peft stores a set, whose order in the exported file would differ between processes.
    adapter_config.target_modules = sorted(adapter_config.target_modules or [])
    return peft_model


def merge_adapter(weight: Float[Tensor, "*S"], adapter: LoraLayer) -> Float[Tensor, "*S"]:
    """Return W + s B @ A as a new tensor, where s is the LoRA scale (Hu et al. 2021, section 4.1).

    The sum is in fp32 for any dtype of `weight`, so that the caller rounds only once; the base
    weight never changes.
    """
    delta: Tensor = adapter.get_delta_weight("default")  # pyrefly: ignore[missing-attribute]
    return weight.float() + delta.float()


def merged_weights(
    plain: nn.Module, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (name, name in the plain model, weight), dequantized and with its adapter merged.

    Sums are in fp32 and rounded once. While `weights` yields one tensor of a layer, all tensors of
    the layer must be in place. Tensors of adapters are not yielded.
    """
    for name, tensor in weights:
        path, _, leaf = name.rpartition(".")
        owner = path.removesuffix(".base_layer")
        layer, wrapper = plain.get_submodule(path), plain.get_submodule(owner)
        is_quantized = isinstance(layer, QuantizedLinear) and leaf in (CODES, SCALES)
        if ".lora_" in name or (is_quantized and leaf == SCALES):
            continue
        leaf, dtype = ("weight", layer.dtype) if is_quantized else (leaf, tensor.dtype)
        weight = layer.dequantize() if is_quantized else tensor
        if isinstance(wrapper, LoraLayer) and leaf == "weight":
            weight = merge_adapter(weight, wrapper)
        yield name, f"{owner}.{leaf}".removeprefix("."), weight.to(dtype)
