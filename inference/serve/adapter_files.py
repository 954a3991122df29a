"""Files of LoRA adapters in peft's form, looked at before anything is loaded."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from pipeline.errors import ModelError
from pipeline.files.safetensors_header import StoredTensor, read_header
from pipeline.models.directory import ADAPTER, TOKENIZER_FILES
from pipeline.models.export import ADAPTER_DIR

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
PLAIN = re.compile(r"\.lora_[AB]\.weight$")


def adapter_directory(path: str) -> Path:
    """Where an adapter is: in `path`, or in `adapter/` there, as a step with LoRA leaves it.

    Raises:
        ModelError: there is none, or one of another kind than LoRA.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise ModelError(f"no such adapter: the directory {directory} does not exist")
    places = [each for each in (directory, directory / ADAPTER_DIR) if (each / ADAPTER).is_file()]
    if not places:
        raise ModelError(
            f"{directory} holds no adapter: it has no {ADAPTER}; give a directory that peft saved,"
            " or a step's that was trained with --lora"
        )
    kind = _settings(places[0]).get("peft_type")
    if kind != "LORA":
        raise ModelError(
            f"{places[0]} holds an adapter of the kind {str(kind)[:32]}, and LoRA alone is served;"
            " merge it with peft's merge_and_unload, and give the result as --path"
        )
    if not (places[0] / WEIGHTS).is_file():
        raise ModelError(f"{places[0]} holds {ADAPTER} and no {WEIGHTS}; copy it there")
    return places[0]


def tokenizer_directory(adapter: Path) -> str | None:
    """Where the tokenizer is that an adapter was trained with; None has the model's."""
    beside = [adapter.parent] if adapter.name == ADAPTER_DIR else []
    for directory in (adapter, *beside):
        if any(file.is_file() for name in TOKENIZER_FILES for file in directory.glob(name)):
            return str(directory)
    return None


def trained_on(adapter: Path) -> str | None:
    """The model that an adapter says it changes."""
    name = _settings(adapter).get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def check_adapter(adapter: Path, name: str, base: nn.Module, path: str) -> int:
    """Its bytes, if it is one of a model of this shape.

    Args:
        adapter: where it is.
        name: by which it is served.
        base: the model that it is to change, which need have no weights.
        path: of that model.

    Raises:
        ModelError: a file is damaged, or it is of another model.
    """
    stored = read_header(adapter / WEIGHTS)
    if not stored:
        raise ModelError(f"{adapter} holds an adapter without tensors")
    for tensor_name, tensor in stored.items():
        wrong = _misfit(tensor_name, tensor, base)
        if wrong:
            raise ModelError(
                f"the adapter {name} in {adapter} is of another model than {path}: {wrong}; give"
                " the model that it was trained on as --path"
            )
    return (adapter / WEIGHTS).stat().st_size


def changes_rows(adapter: Path, base: nn.Module) -> bool:
    """Whether an adapter is plain LoRA of linear layers, which rows of one batch have or have not.

    Others, as DoRA's, change how the layer's own product counts, or bring weights of their own.

    Args:
        adapter: one that fits the model.
        base: the model, which need have no weights.
    """
    owners = {PLAIN.sub("", name.removeprefix(PREFIX)) for name in read_header(adapter / WEIGHTS)}
    layers = dict(base.named_modules())
    return not _settings(adapter).get("alora_invocation_tokens") and all(
        isinstance(layers.get(owner), nn.Linear | Conv1D) for owner in owners
    )


def _misfit(name: str, tensor: StoredTensor, base: nn.Module) -> str | None:
    """Why a tensor of an adapter has no place in a model; None where it has."""
    owner, _, leaf = name.removeprefix(PREFIX).partition(".lora_")
    if not leaf:
        shapes = {each: tuple(param.shape) for each, param in base.named_parameters()}
        own = shapes.get(owner)
        return None if own == tensor.shape else f"it has {name[:100]} of shape {tensor.shape}"
    try:
        module = base.get_submodule(owner)
    except AttributeError:
        return f"that has no {owner[:100]}"
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return f"{owner[:100]} of that has no weight"
    half = leaf.partition(".")[0]
    found = {"A": tensor.shape[-1], "B": tensor.shape[0]}.get(half)
    if found is not None and found not in weight.shape:
        return f"{name[:100]} has the shape {tensor.shape}, and {tuple(weight.shape)} is its weight"
    return None


def _settings(adapter: Path) -> dict[str, Any]:
    try:
        settings = json.loads((adapter / ADAPTER).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{adapter / ADAPTER} can't be read: {error}") from None
    if not isinstance(settings, dict):
        raise ModelError(f"{adapter / ADAPTER} can't be read: it is not a JSON object")
    return settings
