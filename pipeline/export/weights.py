"""Weights as safetensors: an adapter in peft's form, or a model with the adapter merged."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.export.source import Source, UnverifiedError, read_source
from pipeline.files.safetensors_header import INDEX, stored_tensors
from pipeline.files.weight_files import WeightFiles
from pipeline.models.directory import ADAPTER, TOKENIZER_FILES, check_configuration
from pipeline.models.export import ADAPTER_DIR

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
REWRITES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` with which peft takes the adapter's start off the base."""


class Adapter:
    """A directory with a LoRA adapter.

    Raises:
        ModelError: a file is missing, damaged, or of another kind than LoRA.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if not (directory / WEIGHTS).is_file():
            raise ModelError(f"{directory} holds {ADAPTER} and no {WEIGHTS}; copy it there")
        try:
            settings = json.loads((directory / ADAPTER).read_text(encoding="utf-8"))
            self.tensors = load_file(directory / WEIGHTS)
        except Exception as error:  # noqa: BLE001  # safetensors raises any kind
            raise ModelError(f"the adapter in {directory} can't be read: {error}") from None
        if not self.tensors:
            raise ModelError(f"{directory} holds an adapter without tensors")
        self.settings: dict[str, Any] = settings
        if settings.get("peft_type") != "LORA":
            raise ModelError(
                f"{directory} holds an adapter of the kind {settings.get('peft_type')}, which has"
                " no export here; merge it with peft's merge_and_unload"
            )
        if settings.get("use_dora"):
            raise ModelError(
                f"{directory} holds a DoRA adapter, which has no export here; merge it with peft's"
                " merge_and_unload"
            )
        kind = str(settings.get("init_lora_weights"))
        if kind.startswith(REWRITES):
            raise ModelError(
                f"{directory} holds an adapter ({kind}) of what its start has left of the base, not"
                " of the base; save it with peft's path_initial_model_for_weight_conversion, which"
                " makes a plain adapter of it"
            )

    @property
    def base(self) -> str | None:
        """The model that it says it changes."""
        return self.settings.get("base_model_name_or_path") or None

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """W + alpha / r * B A in fp32 (Hu et al. 2021, 4.1), rounded once to the dtype of W.

        W itself where the adapter has nothing for it, the adapter's tensor where that replaces W.
        """
        stem = PREFIX + name.removesuffix(".weight")
        down, up = (self.tensors.get(f"{stem}.lora_{each}.weight") for each in "AB")
        if down is not None and up is not None:
            update = self._scale(name) * (up.float() @ down.float())
            is_turned = bool(self.settings.get("fan_in_fan_out"))
            total = weight.float() + (update.t() if is_turned else update)
            return total.to(weight.dtype)
        own = self.tensors.get(PREFIX + name)
        return weight if own is None else own.to(weight.dtype)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of the weight that the adapter was made for; None where it has none for it."""
        stem = PREFIX + name.removesuffix(".weight")
        down, up = (self.tensors.get(f"{stem}.lora_{each}.weight") for each in "AB")
        if down is None or up is None:
            own = self.tensors.get(PREFIX + name)
            return None if own is None else tuple(own.shape)
        ends = (up.shape[0], down.shape[1])
        return ends[::-1] if self.settings.get("fan_in_fan_out") else ends

    def uses(self, name: str) -> set[str]:
        """The adapter's tensors that `merged` takes for a weight."""
        stem = PREFIX + name.removesuffix(".weight")
        ends = ("lora_A.weight", "lora_B.weight")
        mine = {PREFIX + name, *(f"{stem}.{end}" for end in ends)}
        return mine & self.tensors.keys()

    def _scale(self, name: str) -> float:
        if self.settings.get("rank_pattern") or self.settings.get("alpha_pattern"):
            raise ModelError(
                f"{self.directory} has ranks or alphas of their own for some layers ({name} may be"
                " one); merge it with peft's merge_and_unload"
            )
        rank, alpha = self.settings["r"], self.settings["lora_alpha"]
        return alpha / (rank**0.5 if self.settings.get("use_rslora") else rank)


def plan_adapter(directory: Path) -> Path:
    """Where the adapter of a model is: in `adapter/`, or `directory` itself.

    Raises:
        ModelError: it has none.
    """
    for place in (directory, directory / ADAPTER_DIR):
        if (place / ADAPTER).is_file():
            Adapter(place)
            return place
    check_configuration(directory)
    raise ModelError(
        f"{directory} holds a model without an adapter: it was not trained with LoRA; export it"
        " with --to merged"
    )


def write_adapter(adapter: Path, directory: Path) -> None:
    """Copy the adapter, and the tokenizer and chat template of the model that it lies below."""
    names = (ADAPTER, WEIGHTS)
    for name in names:
        shutil.copyfile(adapter / name, directory / name)
    for pattern in (*TOKENIZER_FILES, "*.jinja"):
        for file in (*adapter.parent.glob(pattern), *adapter.glob(pattern)):
            shutil.copyfile(file, directory / file.name)


def verify_adapter(adapter: Path, directory: Path, *, base: str | None) -> list[str]:
    """What was verified, in sentences.

    Raises:
        UnverifiedError: a tensor differs, or base and adapter don't make the merged model.
    """
    original, copied = Adapter(adapter), load_file(directory / WEIGHTS)
    same = original.tensors.keys() == copied.keys() and all(
        torch.equal(tensor, copied[name]) for name, tensor in original.tensors.items()
    )
    if not same:
        raise UnverifiedError("not exported: a tensor of the adapter was not read back equal")
    verified = [f"{len(copied)} tensors of the adapter read back equal"]
    place = base or original.base
    beside = adapter.parent
    if place is None or not Path(place).is_dir() or not (beside / "config.json").is_file():
        return verified
    count = _compare_with_merged(original, WeightFiles(place), WeightFiles(beside))
    return [*verified, f"{count} tensors of the merged model are those of its base and the adapter"]


def _compare_with_merged(adapter: Adapter, base: WeightFiles, merged: WeightFiles) -> int:
    names = sorted(set(base.names()) & set(merged.names()))
    for name in names:
        ours, theirs = adapter.merged(name, base.tensor(name)), merged.tensor(name)
        # Another machine adds up the product of the adapter's halves in another order.
        rounding = 2 * torch.finfo(theirs.dtype).eps * float(theirs.abs().max())
        if ours.shape != theirs.shape or not bool(
            ((ours.float() - theirs.float()).abs() <= rounding).all()
        ):
            raise UnverifiedError(
                f"not exported: {name} in {merged.path} is not that of {base.path} with the"
                " adapter; give its base with --base"
            )
    return len(names)


@dataclass(frozen=True)
class MergePlan:
    """A base and what is merged into it; None where the weights have it already."""

    base: Source
    adapter: Adapter | None

    def tensors(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Merged weights, one at a time, in the number format of the base."""
        weights = WeightFiles(self.base.directory)
        for name in names:
            weight = weights.tensor(name)
            yield name, weight if self.adapter is None else self.adapter.merged(name, weight)


def plan_merged(directory: Path, base: str | None) -> MergePlan:
    """What is merged into what.

    Raises:
        ModelError: there is no model, no base, or the adapter is for another model.
    """
    if (directory / "config.json").is_file() or not (directory / ADAPTER).is_file():
        return MergePlan(read_source(directory), None)
    adapter = Adapter(directory)
    place = base or adapter.base
    if place is None or not Path(place).expanduser().is_dir():
        beside = directory.parent
        hint = (
            f"{beside} has it merged: give that as --path"
            if (beside / "config.json").is_file()
            else "give the base's directory with --base"
        )
        raise ModelError(f"the base of {directory}, {place}, is not a directory here; {hint}")
    source = read_source(Path(place).expanduser())
    unused = set(adapter.tensors)
    for name, stored in stored_tensors(source.directory).items():
        unused -= adapter.uses(name)
        shape = adapter.shape(name)
        if shape is not None and shape != stored.shape:
            raise ModelError(
                f"{directory} is for another base: its {name} is {shape}, and that of {place} is"
                f" {stored.shape}; give its own with --base"
            )
    if unused:
        raise ModelError(
            f"{min(unused)} of {directory} changes nothing that {place} stores; it is for another"
            " base, or for a head that the base has not: merge it with peft's merge_and_unload"
        )
    return MergePlan(source, adapter)


def write_merged(plan: MergePlan, directory: Path) -> None:
    """Write weights in the files of the base, one file in memory at a time; settings, tokenizer."""
    base = plan.base.directory
    for file, names in _by_file(base).items():
        save_file(dict(plan.tensors(names)), directory / file, metadata={"format": "pt"})
    if (base / INDEX).is_file():
        shutil.copyfile(base / INDEX, directory / INDEX)
    places = [base] if plan.adapter is None else [base, plan.adapter.directory]
    for place in places:
        for pattern in ("config.json", "generation_config.json", "*.jinja", *TOKENIZER_FILES):
            for file in place.glob(pattern):
                shutil.copyfile(file, directory / file.name)


def verify_merged(plan: MergePlan, directory: Path) -> list[str]:
    """What was verified, in sentences.

    Raises:
        UnverifiedError: a tensor was not read back as it was written.
    """
    written = WeightFiles(directory)
    names = list(stored_tensors(plan.base.directory))
    changed = 0
    for name, expected in plan.tensors(names):
        found = written.tensor(name)
        if found.dtype != expected.dtype or not torch.equal(found, expected):
            raise UnverifiedError(f"not exported: {name} was not read back equal")
        changed += plan.adapter is not None and bool(plan.adapter.uses(name))
    read_source(directory)
    if plan.adapter is None:
        return [f"{len(names)} tensors read back equal to those of the model, which has no adapter"]
    return [f"{len(names)} tensors read back equal to the base's, {changed} with the adapter"]


def _by_file(base: Path) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {}
    for name, stored in stored_tensors(base).items():
        files.setdefault(stored.file.name, []).append(name)
    return files
