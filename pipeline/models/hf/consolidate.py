"""Converts checkpoints to Hugging Face directories, in a single process."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from pipeline.config import LoraConfig
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.kernels.adamw import round_weights
from pipeline.models.adapters.lora import Task, add_lora
from pipeline.models.adapters.quantized import quantize_layers, quantized_layers
from pipeline.models.forward.forward import base_model
from pipeline.models.hf.export import export
from pipeline.models.hf.meta import build_on_meta, iter_parameters
from pipeline.system.errors import CheckpointError

TOKENIZER = "tokenizer"
"""Name of the tokenizer's directory, next to the checkpoints."""


def describe_model(module: nn.Module) -> dict[str, Any] | None:
    """Describe the Hugging Face model inside `module`, if any, in JSON types for `consolidate`."""
    for prefix, model in module.named_modules():
        if isinstance(model, PeftModel | PreTrainedModel):
            plain = base_model(model)
            generation = getattr(plain, "generation_config", None)  # classifiers have none
            quantized_by_name = quantized_layers(model)
            dtypes = {name: param.dtype for name, param in model.named_parameters()}
            dtypes |= {f"{name}.weight": layer.dtype for name, layer in quantized_by_name.items()}
            return {
                "prefix": f"{prefix}." if prefix else "",
                "class": type(plain).__name__,
                "config": plain.config.to_dict(),
                "generation": None if generation is None else generation.to_dict(),
                "lora": _describe_adapter(model) if isinstance(model, PeftModel) else None,
                "quantize": next((layer.scheme for layer in quantized_by_name.values()), None),
                "dtypes": {
                    name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()
                },
            }
    return None


def consolidate(checkpoint: Checkpoint, name: str, directory: Path) -> None:
    """Write the model trained by the checkpoint's engine `name` as a Hugging Face directory.

    The result equals the run's export at that step. The full model must fit in memory.

    Raises:
        CheckpointError: the checkpoint has no such model, or `transformers` lacks its class.
    """
    description = checkpoint.state.get("models", {}).get(name)
    if description is None:
        known = ", ".join(checkpoint.state.get("models", {})) or "none"
        raise CheckpointError(f"{checkpoint.path} has no Hugging Face model {name}; it has {known}")
    prefix = description["prefix"]
    keys = set(checkpoint.keys())

    def read(parameter: str, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        key = f"{name}/weights/{prefix}{parameter}"
        if key in keys:
            masters = torch.empty(shape.numel())
            checkpoint.read(key, 0, masters)
            return round_weights(masters, dtype).view(shape)
        out = torch.empty(shape.numel(), dtype=dtype)
        checkpoint.read(f"{name}/frozen/{prefix}{parameter}", 0, out)
        return out.view(shape)

    model = _build(description, checkpoint, read)
    for buffer_name, buffer in model.named_buffers():
        if (key := f"{name}/buffers/{prefix}{buffer_name}") in keys:
            flat = torch.empty_like(buffer).reshape(-1)
            checkpoint.read(key, 0, flat)
            buffer.copy_(flat.view(buffer.shape))
    tokenizer = cast(
        "PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(checkpoint.path.parent / TOKENIZER)
    )
    export(model, tokenizer, directory)


def _build(
    description: Mapping[str, Any],
    checkpoint: Checkpoint,
    read: Callable[[str, torch.dtype, torch.Size], Tensor],
) -> nn.Module:
    """Build the described model with the parameters that `read` returns."""
    model_class = getattr(transformers, description["class"], None)
    if model_class is None:
        raise CheckpointError(
            f"the model of {checkpoint.path} is a {description['class']}, which transformers"
            f" {transformers.__version__} does not have; resume the run to export the model"
        )
    config = model_class.config_class.from_dict(description["config"])
    plain: PreTrainedModel = build_on_meta(lambda: model_class(config))
    if description["generation"] is not None:
        plain.generation_config = GenerationConfig.from_dict(description["generation"])
    model: nn.Module = plain
    if description["lora"] is not None:
        task: Task = description["lora"]["task"]
        settings = {key: value for key, value in description["lora"].items() if key != "task"}
        settings["targets"] = tuple(settings["targets"])
        model = add_lora(plain, LoraConfig(**settings), task=task, seed=0)
    if description["quantize"] is not None:
        quantize_layers(model, description["quantize"])
        for name, layer in quantized_layers(model).items():
            layer.dtype = getattr(torch, description["dtypes"][f"{name}.weight"])
    names = {param: name for name, param in model.named_parameters()}
    parameters: dict[nn.Parameter, nn.Parameter] = {}
    for _, module, leaf, param in iter_parameters(model):
        if param not in parameters:
            dtype = getattr(torch, description["dtypes"][names[param]])
            values = read(names[param], dtype, param.shape)
            parameters[param] = nn.Parameter(values, requires_grad=param.requires_grad)
        setattr(module, leaf, parameters[param])  # tied names share one parameter
    return model


def _describe_adapter(model: PeftModel) -> dict[str, Any]:
    settings: Any = model.peft_config["default"]
    return {
        "rank": settings.r,
        "alpha": float(settings.lora_alpha),
        "variant": "rslora" if settings.use_rslora else "lora",
        "dropout": float(settings.lora_dropout),
        "targets": sorted(settings.target_modules),
        "task": "classifier" if settings.modules_to_save else "causal",
    }
