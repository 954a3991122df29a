"""An adapter alone, in peft's form."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from pipeline.errors import ModelError
from pipeline.export.adapter_files import WEIGHTS, Adapter
from pipeline.export.aside import UnverifiedError
from pipeline.files.weight_files import WeightFiles
from pipeline.models.directory import ADAPTER, TOKENIZER_FILES, check_configuration
from pipeline.models.export import ADAPTER_DIR


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
