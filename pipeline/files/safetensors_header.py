"""What a safetensors file says it holds, read without torch and without its tensors.

Format: https://huggingface.co/docs/safetensors/index#format
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.system.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

LONGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""

BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL"), 8),
}
"""Of one element; the 8-bit floats and narrower formats are not checked for their size."""

LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class StoredTensor:
    """Where the bytes of one tensor lie."""

    file: Path
    position: int
    """Of its first byte in the file."""

    shape: tuple[int, ...]
    dtype: str
    """As the format calls it: F32, BF16, ..."""


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of `model.safetensors`, or of the shards that its index names, by their names.

    Raises:
        ModelError: there are none, or a file is damaged, missing, or not what the index says.
    """
    if (directory / SINGLE).is_file():
        return read_header(directory / SINGLE)
    index = directory / INDEX
    if not index.is_file():
        raise ModelError(_nothing_found(directory))
    weight_map = _weight_map(index)
    stored: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise ModelError(f"{index} names {shard}, which is outside of its directory")
        if not (directory / shard).is_file():
            raise ModelError(
                f"{directory / shard} can't be read: {INDEX} names it, but it is not there; copy it"
                " there, or download the model again"
            )
        stored |= read_header(directory / shard)
    absent = weight_map.keys() - stored.keys()
    if absent:
        name = min(absent)
        raise ModelError(f"{index} says that {weight_map[name]} holds {name}, but it doesn't")
    return stored


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file.

    Raises:
        ModelError: it can't be read, or is not a whole safetensors file.
    """
    require_no_pointer(file)
    try:
        return _entries(file, *_read(file))
    except _DamagedError as error:
        reason = str(error)
    except RecursionError:
        reason = "its header is nested too deep; it is damaged"
    except ValueError:  # no JSON, no UTF-8
        reason = "its header is not JSON; it is damaged or of another format"
    except OSError as error:
        reason = str(error.strerror or error)
    raise ModelError(f"{file} can't be read as safetensors: {reason}")


def _read(file: Path) -> tuple[object, int, int]:
    """The header, where the tensors begin after it, and the size of the file."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, LONGEST_HEADER):
            raise _DamagedError(_no_header(size, length))
        return json.loads(opened.read(length)), 8 + length, size


def require_no_pointer(file: Path) -> None:
    """Refuse what Git leaves in the place of a large file that it has not fetched.

    Raises:
        ModelError: it is a Git-LFS pointer.
    """
    try:
        with file.open("rb") as opened:
            is_pointer = opened.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return  # whoever reads it says what is wrong
    if is_pointer:
        raise ModelError(
            f"{file} is a Git-LFS pointer, not the file itself; run `git lfs pull` in {file.parent}"
        )


class _DamagedError(Exception):
    """The file is not a whole safetensors file; the message says why."""


def _impossible(name: str) -> _DamagedError:
    return _DamagedError(f"what its header says of {name} can't be; it is damaged")


def _no_header(size: int, length: int) -> str:
    if size == 0:
        return "it is empty"
    if size < 8 or length > LONGEST_HEADER or length < 2:
        return "it does not begin as such a file does; it is damaged or of another format"
    return (
        f"it ends at byte {size}, within its header of {length} bytes: it was not copied whole;"
        " copy or download it again"
    )


def _entries(file: Path, header: object, start: int, size: int) -> dict[str, StoredTensor]:
    if not isinstance(header, dict):
        raise _DamagedError("its header is not a JSON object; it is damaged")
    stored: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            shape, dtype = tuple(entry["shape"]), entry["dtype"]
            begin, end = entry["data_offsets"]
            fits = dtype not in BITS or (end - begin) * 8 == math.prod(shape) * BITS[dtype]
            sound = fits and 0 <= begin <= end and all(each >= 0 for each in shape)
        except (KeyError, TypeError, ValueError):
            raise _impossible(name) from None
        if not sound:
            raise _impossible(name)
        stored[name] = StoredTensor(file, start + begin, shape, dtype)
        spans.append((begin, end))
    end = 0
    for begin, stop in sorted(spans):
        if begin != end:
            raise _DamagedError("its tensors overlap or leave gaps; it is damaged")
        end = stop
    if size < start + end:
        raise _DamagedError(
            f"it ends at byte {size} of {start + end}: it was not copied whole; copy or download it"
            " again"
        )
    if size > start + end:
        raise _DamagedError(f"it goes on after byte {start + end}, its tensors' end; it is damaged")
    return stored


def _weight_map(index: Path) -> Mapping[str, str]:
    require_no_pointer(index)
    try:
        weight_map: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(
            f"{index} is not an index of safetensors files: {_reason(error)}; download it again"
        ) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} is not an index of safetensors files: its weight_map names none")
    if not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ModelError(
            f"{index} is not an index of safetensors files: its weight_map has no names"
        )
    return weight_map


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON ({error})"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if isinstance(error, OSError):
        return str(error.strerror or error)
    return "it has no weight_map"


def _nothing_found(directory: Path) -> str:
    """A sentence about a directory without safetensors that can be read."""
    pickled = sorted(directory.glob("pytorch_model*.bin"))
    if pickled:
        return (
            f"{directory} holds its weights as {pickled[0].name}, a pickle that can run code;"
            " save the model as safetensors first: save_pretrained does"
        )
    nothing = f"{directory} holds no weights: it has neither {SINGLE} nor {INDEX}"
    shards = sorted(directory.glob("*.safetensors"))
    if shards:
        return f"{nothing}, only {shards[0].name}; copy the missing file from where it came"
    for pattern, kind in (("*.gguf", "GGUF"), ("*.h5", "TensorFlow"), ("*.msgpack", "Flax")):
        other = sorted(directory.glob(pattern))
        if other:
            return f"{nothing}, only {other[0].name}, which is of {kind}; take its safetensors"
    return f"{nothing}; copy them there, or download the model again"
