"""A whole model, with the adapter in its weights."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.export.adapter_files import Adapter
from pipeline.export.aside import UnverifiedError
from pipeline.export.source import Source, read_source
from pipeline.files.safetensors_header import INDEX, stored_tensors
from pipeline.files.weight_files import WeightFiles
from pipeline.models.directory import ADAPTER, TOKENIZER_FILES


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
