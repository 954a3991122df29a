"""Writing models as Hugging Face directories that plain `transformers` loads."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedTokenizerBase

from pipeline.distributed import barrier, is_main
from pipeline.models.forward import base_model

ADAPTER_DIR = "adapter"


def export(model: nn.Module, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write config, safetensors and tokenizer into `directory`, each file replaced whole.

    With LoRA the directory holds the merged model, and `adapter/` the adapter in peft's form. The
    trained model itself is not changed. All processes call it; the main one writes, and none goes
    on before the files are there.
    """
    if is_main():
        _write(model, tokenizer, directory)
    barrier()


def set_stop_tokens(model: nn.Module, stop_ids: Sequence[int]) -> None:
    """Have plain `generate` stop where the chat format ends a turn."""
    generation = base_model(model).generation_config
    if generation is not None:
        generation.eos_token_id = list(stop_ids)


def _write(model: nn.Module, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".writing-") as scratch:
        staging = Path(scratch)
        model_to_save = base_model(model)
        if model_to_save.config.pad_token_id is None:  # plain classifiers need it for batches
            model_to_save.config.pad_token_id = tokenizer.pad_token_id
        model_to_save.save_pretrained(staging, state_dict=merged_state_dict(model))
        tokenizer.save_pretrained(staging)
        if isinstance(model, PeftModel):
            model.save_pretrained(str(staging / ADAPTER_DIR))
        for path in sorted(staging.iterdir()):
            target = directory / path.name
            if target.is_dir():
                shutil.rmtree(target)
            path.replace(target)


def merged_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights as the plain model has them: adapters added into copies, never into the base."""
    plain = base_model(model)
    if not isinstance(model, PeftModel):
        return plain.state_dict()
    layers = {
        name: module for name, module in plain.named_modules() if isinstance(module, LoraLayer)
    }
    merged: dict[str, torch.Tensor] = {}
    for name, weight in plain.state_dict().items():
        owner, _, leaf = name.partition(".base_layer.")
        if ".lora_" in name or ".original_module." in name:
            continue
        if leaf == "weight" and owner in layers:
            delta = layers[owner].get_delta_weight("default")  # pyright: ignore[reportAttributeAccessIssue]
            merged[f"{owner}.weight"] = (weight.float() + delta.float()).to(weight.dtype)
        elif leaf:
            merged[f"{owner}.{leaf}"] = weight
        else:
            merged[name.replace(".modules_to_save.default.", ".")] = weight
    return merged
