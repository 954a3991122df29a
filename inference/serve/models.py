"""The models and adapters to serve, with their names, checked before anything is loaded."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from inference.serve.config import ServeConfig
from pipeline.errors import ConfigError, DataError, ModelError, require
from pipeline.files.safetensors_header import StoredTensor, read_header
from pipeline.models.directory import ADAPTER, TOKENIZER_FILES
from pipeline.models.export import ADAPTER_DIR
from pipeline.report.results import StepResult, read_results

NAME = re.compile(r"[\w.:-]{1,64}")
BASE = "base"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
PLAIN = re.compile(r"\.lora_[AB]\.weight$")
MERGE = "merge it with peft's merge_and_unload, and give the result as --path"


@dataclass(frozen=True)
class ModelPath:
    """A model to serve."""

    name: str
    path: str

    seed: int = 0
    """Seed of the weights of an embedded base model."""

    format_of: str | None = None
    """Model whose chat template a model without its own takes."""

    adapter: Path | None = None
    """Directory of an adapter over the model; None for the model alone."""

    base: str | None = None
    """Name of the model under the adapter; None without one."""

    @property
    def begins_run(self) -> bool:
        """Whether it is the model that a run's first step began from."""
        return self.format_of is not None


def paths_to_serve(config: ServeConfig) -> list[ModelPath]:
    """The models of `--path` and `--run`, and the adapters, each with its own name.

    Raises:
        ConfigError: two have the same name, or there is no model for the adapters.
        ModelError: the run has no model yet, or there is no adapter in a directory.
    """
    found = [] if config.run is None else models_of_run(config.run)
    found += [_named(word) for word in config.path]
    found += _adapted(config, found)
    names = [place.name for place in found]
    for name in names:
        require(
            names.count(name) == 1,
            f"--path: two models are called {name}; name them, as sft=OUT/step1_sft",
        )
    return found


def _adapted(config: ServeConfig, models: Sequence[ModelPath]) -> list[ModelPath]:
    """The adapters, over the model of `--adapter-base`."""
    if not config.adapter:
        return []
    wanted = config.adapter_base
    bases = [place for place in models if wanted in (None, place.name)]
    if not bases:
        names = ", ".join(place.name for place in models) or "none"
        raise ConfigError(f"--adapter-base: there is no model {wanted}; there are: {names}")
    found: list[ModelPath] = []
    for word in config.adapter:
        name, equals, path = word.partition("=")
        require(
            bool(equals and path and NAME.fullmatch(name)),
            f"--adapter takes NAME=DIR, as polite=OUT/step1_sft, got {word[:100]}",
        )
        directory = adapter_directory(path)
        found.append(replace(bases[0], name=name, adapter=directory, base=bases[0].name))
    return found


def _named(word: str) -> ModelPath:
    name, equals, path = word.partition("=")
    if equals and NAME.fullmatch(name) and path:
        return ModelPath(name, path)
    directory = Path(word).expanduser()
    name = directory.name or directory.resolve().name
    if name in ("actor", "ema") and directory.parent.name:
        name = directory.parent.name if name == "actor" else f"{directory.parent.name}-{name}"
    return ModelPath(re.sub(r"[^\w.:-]", "-", name)[:64] or "model", word)


def models_of_run(out: Path) -> list[ModelPath]:
    """The models of a run that answer: base, step 1, and step 3 of each method.

    Raises:
        ModelError: there is none.
    """
    found: list[ModelPath] = []
    for name, step in _steps(out).items():
        if not found and step.finished and step.has("perplexity_after"):
            found += _base(step, str(out / name))
        for directory in (out / name, out / name / "actor"):
            talks = step.has("perplexity_after") or directory.name == "actor"
            if step.finished and talks and (directory / "config.json").is_file():
                found.append(ModelPath(name, str(directory)))
    if all(place.name == BASE for place in found):
        raise ModelError(f"--run {out} has no model to talk to yet; finish its steps with --resume")
    return found


def reward_of_run(out: Path) -> str | None:
    """The reward model of a run, if it has one."""
    for name, step in _steps(out).items():
        if step.finished and step.has("accuracy_after") and (out / name / "config.json").is_file():
            return str(out / name)
    return None


def _steps(out: Path) -> Mapping[str, StepResult]:
    try:
        return read_results(out).steps
    except DataError as error:
        raise ConfigError(f"--run {error}") from None


def _base(step: StepResult, directory: str) -> list[ModelPath]:
    """The model that step 1 began from; none if its settings don't name one."""
    path, seed = step.settings.get("model.path"), step.settings.get("seed")
    if not isinstance(path, str):
        return []
    return [ModelPath(BASE, path, seed if isinstance(seed, int) else 0, directory)]


def adapter_directory(path: str) -> Path:
    """The directory of an adapter: `path`, or `adapter/` in it, as a step with LoRA leaves it.

    Raises:
        ModelError: there is none, or one of another kind than LoRA.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise ModelError(f"no such adapter: the directory {directory} does not exist")
    places = [
        place for place in (directory, directory / ADAPTER_DIR) if (place / ADAPTER).is_file()
    ]
    if not places:
        raise ModelError(
            f"{directory} holds no adapter: it has no {ADAPTER}; give a directory that peft saved,"
            " or a step's that was trained with --lora"
        )
    kind = _settings(places[0]).get("peft_type")
    if kind != "LORA":
        raise ModelError(
            f"{places[0]} holds an adapter of the kind {str(kind)[:32]}, and LoRA alone is served;"
            f" {MERGE}"
        )
    if not (places[0] / WEIGHTS).is_file():
        raise ModelError(f"{places[0]} holds {ADAPTER} and no {WEIGHTS}; copy it there")
    return places[0]


def tokenizer_directory(adapter: Path) -> str | None:
    """The directory of the tokenizer that an adapter was trained with; None for the model's."""
    parents = [adapter.parent] if adapter.name == ADAPTER_DIR else []
    for directory in (adapter, *parents):
        if any(file.is_file() for name in TOKENIZER_FILES for file in directory.glob(name)):
            return str(directory)
    return None


def trained_on(adapter: Path) -> str | None:
    """The name of the model that an adapter was trained on."""
    name = _settings(adapter).get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def check_adapter(place: ModelPath, base: nn.Module) -> int:
    """Return the bytes of an adapter that fits the model.

    Args:
        place: of the adapter.
        base: the model, which may be on the meta device.

    Raises:
        ModelError: a file is damaged, or the adapter is of another model or not plain LoRA of
            linear layers.
    """
    adapter = place.adapter
    assert adapter is not None
    stored = read_header(adapter / WEIGHTS)
    if not stored:
        raise ModelError(f"{adapter} holds an adapter without tensors")
    for name, tensor in stored.items():
        wrong = _misfit(name, tensor, base)
        if wrong:
            raise ModelError(
                f"the adapter {place.name} in {adapter} is of another model than {place.path}:"
                f" {wrong}; give the model that it was trained on as --path"
            )
    layers = dict(base.named_modules())
    owners = {PLAIN.sub("", name.removeprefix(PREFIX)) for name in stored}
    if _settings(adapter).get("alora_invocation_tokens") or not all(
        isinstance(layers.get(owner), nn.Linear | Conv1D) for owner in owners
    ):
        raise ModelError(
            f"the adapter {place.name} in {adapter} is not plain LoRA of linear layers; {MERGE}"
        )
    return (adapter / WEIGHTS).stat().st_size


def _misfit(name: str, tensor: StoredTensor, base: nn.Module) -> str | None:
    """Why a tensor of an adapter doesn't fit a model; None if it does."""
    owner, _, leaf = name.removeprefix(PREFIX).partition(".lora_")
    if not leaf:
        shapes = {path: tuple(param.shape) for path, param in base.named_parameters()}
        fits = shapes.get(owner) == tensor.shape
        return None if fits else f"it has {name[:100]} of shape {tensor.shape}"
    try:
        module = base.get_submodule(owner)
    except AttributeError:
        return f"that has no {owner[:100]}"
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return f"{owner[:100]} of that has no weight"
    size = {"A": tensor.shape[-1], "B": tensor.shape[0]}.get(leaf.partition(".")[0])
    if size is not None and size not in weight.shape:
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
