"""Headers of safetensors files: where each tensor is stored, read without torch.

Format: https://huggingface.co/docs/safetensors/index#format
"""

import json
from dataclasses import dataclass
from pathlib import Path

from pipeline.system.errors import ModelError, UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class StoredTensor:
    """Location of one tensor."""

    file: Path
    offset: int
    """Offset of its first byte in the file."""

    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype in the format: F32, BF16, ..."""


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of `model.safetensors`, or of the shards listed in its index.

    Raises:
        ModelError: there are no files, or one is damaged, missing, or differs from the index.
    """
    if (directory / SINGLE).is_file():
        return read_header(directory / SINGLE)
    index = directory / INDEX
    if not index.is_file():
        raise ModelError(
            f"{directory} has no weights: it has neither {SINGLE} nor {INDEX}; copy or download its"
            " safetensors files"
        )
    weight_map = _read_weight_map(index)
    stored: dict[str, StoredTensor] = {}
    for shard_name in sorted(set(weight_map.values())):
        if Path(shard_name).name != shard_name:
            raise ModelError(f"{index} refers to {shard_name}, which is outside its directory")
        if not (directory / shard_name).is_file():
            raise ModelError(
                f"{directory / shard_name} can't be read: it is listed in {INDEX} but missing; copy"
                " it, or download the model again"
            )
        stored |= read_header(directory / shard_name)
    missing = weight_map.keys() - stored.keys()
    if missing:
        name = min(missing)
        raise ModelError(f"{index} lists {name} in {weight_map[name]}, which doesn't contain it")
    return stored


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file by name.

    Raises:
        ModelError: the file can't be read, or is not a complete safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    reject_lfs_pointer(file)
    try:
        with safe_open(file, "np"), file.open("rb") as stream:  # safe_open checks header and size
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{file} can't be read as safetensors: {error}; copy or download it again"
        ) from None
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(
            file, 8 + length + entry["data_offsets"][0], tuple(entry["shape"]), entry["dtype"]
        )
        for name, entry in header.items()
    }


def reject_lfs_pointer(file: Path, error: type[UserError] = ModelError) -> None:
    """Raise `error` if a file is a Git LFS pointer in place of a large file."""
    try:
        with file.open("rb") as stream:
            is_pointer = stream.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return  # reading the content gives a better error
    if is_pointer:
        raise error(
            f"{file} is a Git LFS pointer, not the file itself; run `git lfs pull` in {file.parent}"
        )


def _read_weight_map(index: Path) -> dict[str, str]:
    reject_lfs_pointer(index)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        weight_map = None
    is_map = isinstance(weight_map, dict) and all(isinstance(f, str) for f in weight_map.values())
    if not is_map or not weight_map:
        raise ModelError(f"{index} is not an index of safetensors files; download it again")
    return weight_map
