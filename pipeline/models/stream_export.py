"""Weights as safetensors, written while they come in."""

import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from pipeline.faults import fault_point
from pipeline.files.durable import replace_durably, settle, sync_directory
from pipeline.files.safetensors_header import INDEX, SINGLE

SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")

MAX_SHARD_BYTES = 5_000_000_000
"""Of a file, unless one tensor is larger."""

NamedTensors = Iterable[tuple[str, Tensor]]


def can_stream(model: PreTrainedModel) -> bool:
    """Whether one parameter is enough to tell what the family's files hold for it.

    Some hold in one tensor what the model has in several.
    """
    return not any(
        isinstance(step, WeightConverter) and len(step.target_patterns) > 1
        for step in get_model_conversion_mapping(model, add_legacy=False)
    )


def as_saved(model: PreTrainedModel, named: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """Parameters under the names, and cut into the pieces, that `save_pretrained` writes.

    Some families have other names in files than in the model, or hold in one parameter what their
    files have by expert.

    Raises:
        ValueError: the family can't be written this way.
    """
    if not can_stream(model):
        raise ValueError(f"{model.config.model_type} models are saved by save_pretrained only")
    for name, tensor in named:
        yield from revert_weight_conversion(model, {name: tensor}).items()


def stream_export(
    named: NamedTensors, directory: Path, *, max_shard_bytes: int | None = None
) -> None:
    """Write full tensors as `model.safetensors`, or as shards and their index.

    In memory are one shard's tensors at most, as copies on the CPU, and the one that `named`
    yields, which may be freed or filled again at the next turn. The directory's weights are
    replaced at the end, when the new ones are on the disk; a process that is killed meanwhile, or a
    loss of power, leaves the old ones, the new ones or none, but no mixture.

    Raises:
        ValueError: a name came twice.
    """
    max_shard_bytes = max_shard_bytes or MAX_SHARD_BYTES
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".writing-") as scratch:
        shards = _Shards(Path(scratch))
        for name, tensor in named:
            if shards.pending_bytes and shards.pending_bytes + tensor.nbytes > max_shard_bytes:
                shards.write()
            shards.add(name, tensor)
            del tensor  # the caller's is not ours to keep while it makes the next
        shards.write()
        fault_point("export.before_replace")
        _replace(shards, directory)


class _Shards:
    """Files of tensors, numbered in the order in which they are written."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.files: list[Path] = []
        self.shard_of: dict[str, int] = {}
        self.pending_bytes = self.total_size = self.total_parameters = 0
        self._pending: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor of the next file to the CPU."""
        if name in self.shard_of:
            raise ValueError(f"{name} came twice")
        self.shard_of[name] = len(self.files)
        self.pending_bytes += tensor.nbytes
        self.total_size += tensor.nbytes
        self.total_parameters += tensor.numel()
        self._pending[name] = tensor.detach().to(
            "cpu", copy=True, memory_format=torch.contiguous_format
        )

    def write(self) -> None:
        """Write what was added since the last call."""
        fault_point("export.before_shard")
        file = self.scratch / f"{len(self.files)}.safetensors"
        save_file(self._pending, file, metadata={"format": "pt"})
        self.files.append(file)
        self._pending, self.pending_bytes = {}, 0

    def index(self, names: list[str]) -> str:
        """The index of the shards under their final names."""
        totals = {"total_parameters": self.total_parameters, "total_size": self.total_size}
        weight_map = {name: names[shard] for name, shard in sorted(self.shard_of.items())}
        return json.dumps({"metadata": totals, "weight_map": weight_map}, indent=2) + "\n"


def _replace(shards: _Shards, directory: Path) -> None:
    """Move the files in place; what they replace disappears.

    A single file goes before an index where both are there, so it is taken away last. An index goes
    before its shards change.
    """
    single, index = directory / SINGLE, directory / INDEX
    stale = {path for path in directory.iterdir() if SHARD.fullmatch(path.name)}
    count = len(shards.files)
    settle(shards.scratch)
    if count == 1:
        shards.files[0].replace(single)
        sync_directory(directory)
        index.unlink(missing_ok=True)
    else:
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        index.unlink(missing_ok=True)
        sync_directory(directory)
        for file, name in zip(shards.files, names, strict=True):
            file.replace(directory / name)
            stale.discard(directory / name)
        sync_directory(directory)
        replace_durably(index, shards.index(names).encode(), temporary=shards.scratch / INDEX)
        single.unlink(missing_ok=True)
    for path in stale:
        path.unlink()
    sync_directory(directory)
