"""Safetensors exports: a model with its adapter merged by peft, or the adapter alone."""

import shutil
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from pipeline.export.source import Source, copy_settings, read_source
from pipeline.export.verify import ROUNDED, TOLERANCE, UnverifiedError, compare_outputs, logits_fn
from pipeline.files.safetensors_header import INDEX, stored_tensors
from pipeline.models.adapters.lora import suppress_peft_warnings
from pipeline.models.hf.directory import ADAPTER, check_configuration
from pipeline.models.hf.export import ADAPTER_DIR, unties_layers
from pipeline.system.errors import ConfigError, ModelError, one_line

WEIGHTS = "adapter_model.safetensors"


class MergedExport:
    """The weights of a model, or of an adapter merged into its base."""

    def __init__(self, directory: Path, base: str | None) -> None:
        self.source = directory
        self.has_adapter = not (directory / "config.json").is_file() and _has_adapter(directory)
        if base is not None and not self.has_adapter:
            raise ConfigError(f"{directory} is a complete model, not an adapter; omit --base")
        self.title = "weights with the adapter merged" if self.has_adapter else "weights"
        self.base = _find_base(directory, base) if self.has_adapter else read_source(directory)
        self.adapted = _apply_adapter(_load(self.base), directory) if self.has_adapter else None

    def write(self, directory: Path) -> None:
        """Write the weights in the base's data type, the settings and the tokenizer."""
        base = self.base.directory
        merged = None if self.adapted is None else self.adapted.merge_and_unload()
        self.adapted = None
        if merged is not None:
            merged.to(dtype=_dtype(self.base)).save_pretrained(directory)  # round only once
        else:
            files = {stored.file for stored in stored_tensors(base).values()}
            for file in (*files, *base.glob(INDEX)):
                shutil.copyfile(file, directory / file.name)
        for source_directory in (base, *([self.source] if self.has_adapter else [])):
            copy_settings(source_directory, directory)
        if merged is not None:  # tied layers differ if the adapter trains one of them
            merged.config.save_pretrained(directory)

    def verify(self, directory: Path) -> list[str]:
        """Compare the outputs of the written model and of the source with its adapter, if any."""
        is_rounded = self.has_adapter and _dtype(self.base) != torch.float32
        model, exported = _load(self.base), _load(read_source(directory))
        if self.has_adapter:
            model = _apply_adapter(model, self.source)
        return compare_outputs(
            exported,
            logits_fn(model),
            logits_fn(exported),
            program="the written model",
            tolerance=ROUNDED if is_rounded else TOLERANCE,
        )


class AdapterExport:
    """An adapter in peft's format, without its base, from `directory` or `directory/adapter`."""

    title = "adapter without its base, in peft's format"

    def __init__(self, directory: Path, base: str | None) -> None:
        candidates = (directory, directory / ADAPTER_DIR)
        source = next((path for path in candidates if _has_adapter(path)), None)
        if source is None:
            check_configuration(directory)
            raise ModelError(
                f"{directory} contains a model without an adapter; export it with --to merged"
            )
        self.source, self.base = source, base

    def write(self, directory: Path) -> None:
        """Copy the adapter, and the tokenizer and chat template of the model that contains it."""
        for source_directory in (self.source.parent, self.source):
            copy_settings(source_directory, directory)
        (directory / "config.json").unlink(missing_ok=True)
        for name in (ADAPTER, WEIGHTS):
            shutil.copyfile(self.source / name, directory / name)

    def verify(self, directory: Path) -> list[str]:
        """Compare tensors and, if the merged model and its base are available, outputs."""
        tensors, copied = (load_file(path / WEIGHTS) for path in (self.source, directory))
        if not all(torch.equal(tensor, copied[name]) for name, tensor in tensors.items()):
            raise UnverifiedError("not exported: a tensor of the adapter differs when read back")
        verified = [f"{len(copied)} tensors of the adapter match when read back"]
        parent = self.source.parent
        if not (parent / "config.json").is_file():
            return verified
        try:
            base = _find_base(self.source, self.base)
        except ModelError:
            return verified
        merged, model = _load(read_source(parent)), _apply_adapter(_load(base), directory)
        tolerance = TOLERANCE if _dtype(base) == torch.float32 else ROUNDED
        return verified + compare_outputs(
            merged,
            logits_fn(merged),
            logits_fn(model),
            program="the base with the adapter",
            tolerance=tolerance,
        )


def _has_adapter(directory: Path) -> bool:
    return (directory / ADAPTER).is_file()


def _find_base(adapter: Path, base: str | None) -> Source:
    """Find the base model of an adapter."""
    from peft import PeftConfig

    path = base or str(PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path)
    if not Path(path).expanduser().is_dir():
        parent = adapter.parent
        hint = (
            f"{parent} is the merged model: pass it as --path"
            if (parent / "config.json").is_file()
            else "pass the base's directory with --base"
        )
        raise ModelError(f"the base of {adapter}, {path}, is not a local directory; {hint}")
    return read_source(Path(path).expanduser())


def _load(source: Source) -> Any:  # noqa: ANN401  # transformers' Auto classes return any class
    """Load the model in fp32, in evaluation mode."""
    auto = AutoModelForSequenceClassification if source.is_classifier else AutoModelForCausalLM
    return auto.from_pretrained(source.directory, dtype=torch.float32).eval()


def _dtype(source: Source) -> torch.dtype:
    """Return the data type of the stored weights."""
    dtype = AutoConfig.from_pretrained(source.directory).dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _apply_adapter(model: PreTrainedModel, adapter: Path) -> PeftModel:
    """Load an adapter into the model."""
    name = model.config.name_or_path
    try:
        tensors = load_file(adapter / WEIGHTS)
        if unties_layers(model, tensors):
            head: Any = model.get_output_embeddings()
            head.weight = torch.nn.Parameter(head.weight.detach().clone())
            model.config.get_text_config().tie_word_embeddings = False
        with suppress_peft_warnings():
            adapted = PeftModel.from_pretrained(model, str(adapter)).eval()
            loaded = get_peft_model_state_dict(adapted).keys()
    except Exception as error:  # noqa: BLE001  # peft and safetensors may raise anything
        raise ModelError(
            f"the adapter in {adapter} can't be applied to {name}: {one_line(error)}; pass"
            " its base with --base"
        ) from None
    if unused := tensors.keys() - loaded:
        raise ModelError(
            f"{min(unused)} of {adapter} matches nothing in {name}; the adapter is for another"
            " base: pass that base with --base"
        )
    return adapted
