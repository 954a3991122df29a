"""Tensors in the weight files of a local Hugging Face directory, read and written in place."""

import math
import os
from pathlib import Path

import torch
from jaxtyping import Shaped
from torch import Tensor

from pipeline.files.safetensors_header import stored_tensors
from pipeline.system.errors import ModelError


def view_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, as it is: writing to it changes the tensor."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def read_at(file: int, part: memoryview, position: int) -> None:
    """Fill `part` with the bytes of the open file from `position` on.

    Raises:
        EOFError: the file ends before.
        OSError: the system can't read.
    """
    while part.nbytes:
        count = os.preadv(file, [part], position)
        if count == 0:
            raise EOFError(f"the file ends at byte {os.fstat(file).st_size}")
        position += count
        part = part[count:]


def write_at(file: int, part: memoryview, position: int) -> None:
    """Write `part` to the open file at `position`.

    Raises:
        OSError: the system can't write.
    """
    while part.nbytes:
        count = os.pwrite(file, part, position)
        position += count
        part = part[count:]


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


class WeightFiles:
    """The tensors of `model.safetensors`, or of the shards that its index names.

    Only headers are read at first, and then only the requested elements.
    Several threads and processes may read at once.

    Raises:
        ModelError: the directory holds no safetensors, or a damaged or incomplete set of them.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self._stored = stored_tensors(self.path)

    def names(self) -> list[str]:
        """The tensors' names, as the files have them."""
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""
        return self._stored[name].shape

    def tensor(self, name: str) -> Tensor:
        """Return a full tensor on the CPU, in its stored type.

        Raises:
            ModelError: as `slice` does.
        """
        shape = self.shape(name)
        dtype = DTYPES.get(self._stored[name].dtype, torch.float32)  # `slice` refuses others
        return self.slice(name, 0, math.prod(shape), dtype=dtype).reshape(shape)

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
                read_at(file.fileno(), view_bytes(piece), position)
        except (OSError, EOFError) as error:
            raise ModelError(f"{name} can't be read from {stored.file}: {error}") from error
        return piece.to(dtype)
