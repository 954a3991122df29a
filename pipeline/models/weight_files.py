"""Pieces of the weights in a local Hugging Face directory."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.tensor_io import bytes_of, read_at

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The number formats of weights and buffers, as safetensors calls them; those of quantized models,
which mean nothing without their scales, are not among them."""


@dataclass(frozen=True)
class _Stored:
    """Where one tensor's bytes lie."""

    file: Path
    position: int
    shape: tuple[int, ...]
    dtype: str


class WeightFiles:
    """The tensors of `model.safetensors`, or of the shards that its index names.

    Only headers are read at first, and then no byte more than the elements that are asked for.
    Several threads and processes may read at once.

    Raises:
        ModelError: the directory holds no safetensors, or a damaged or incomplete set of them.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self._stored: dict[str, _Stored] = {}
        if (self.path / SINGLE).is_file():
            self._stored = _header(self.path / SINGLE)
        else:
            self._read_shards()

    def names(self) -> list[str]:
        """The tensors' names, as the files have them."""
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""
        return self._stored[name].shape

    def slice(
        self, name: str, start: int, stop: int, *, dtype: torch.dtype
    ) -> Shaped[Tensor, " n"]:
        """Elements `start` to `stop` of the flattened tensor, on the CPU, converted to `dtype`.

        Raises:
            ModelError: the file ends before them, or holds another number format than `DTYPES`.
        """
        stored = self._stored[name]
        if not 0 <= start <= stop <= math.prod(stored.shape):
            raise ValueError(f"{name} of shape {stored.shape} has no elements {start} to {stop}")
        stored_dtype = DTYPES.get(stored.dtype)
        if stored_dtype is None:
            raise ModelError(
                f"{name} in {stored.file} has the number format {stored.dtype}; only models that"
                f" are not quantized can be trained: {', '.join(DTYPES)}"
            )
        piece = torch.empty(stop - start, dtype=stored_dtype)
        try:
            with stored.file.open("rb", buffering=0) as file:
                position = stored.position + start * stored_dtype.itemsize
                read_at(file.fileno(), [bytes_of(piece)], position)
        except (OSError, EOFError) as error:
            raise ModelError(f"{name} can't be read from {stored.file}: {error}") from error
        return piece.to(dtype)

    def _read_shards(self) -> None:
        index = self.path / INDEX
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except FileNotFoundError:
            raise ModelError(self._nothing_found()) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{index} is no index of safetensors files: {error!r}") from error
        for shard in sorted(set(weight_map.values())):
            if Path(shard).name != shard:
                raise ModelError(f"{index} names {shard}, which is outside of its directory")
            self._stored |= _header(self.path / shard)
        absent = weight_map.keys() - self._stored.keys()
        if absent:
            name = min(absent)
            raise ModelError(f"{index} says that {weight_map[name]} holds {name}, but it doesn't")

    def _nothing_found(self) -> str:
        pickled = sorted(self.path.glob("pytorch_model*.bin"))
        if pickled:
            return (
                f"{self.path} holds its weights as {pickled[0].name}, a pickle that can run code;"
                " save the model as safetensors first: save_pretrained does"
            )
        return f"{self.path} holds no weights: it has neither {SINGLE} nor {INDEX}"


def _header(file: Path) -> dict[str, _Stored]:
    try:
        with safe_open(file, framework="pt"):  # checks sizes, shapes and offsets
            pass
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} can't be read as safetensors: {error}") from error
    return {
        name: _Stored(
            file=file,
            position=8 + length + entry["data_offsets"][0],
            shape=tuple(entry["shape"]),
            dtype=entry["dtype"],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }
