"""Read the bytes of tensors from files, and write them in place."""

import os

import torch
from torch import Tensor


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor; writing to it changes the tensor."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def read_at(file: int, buffer: memoryview, offset: int) -> None:
    """Fill `buffer` with the bytes of the open file that start at `offset`.

    Raises:
        EOFError: the file ends too early.
        OSError: the read fails.
    """
    while buffer.nbytes:
        count = os.preadv(file, [buffer], offset)
        if count == 0:
            raise EOFError(f"the file ends at byte {os.fstat(file).st_size}")
        offset += count
        buffer = buffer[count:]


def write_at(file: int, buffer: memoryview, offset: int) -> None:
    """Write `buffer` to the open file at `offset`.

    Raises:
        OSError: the write fails.
    """
    while buffer.nbytes:
        count = os.pwrite(file, buffer, offset)
        offset += count
        buffer = buffer[count:]


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
"""Dtypes of weights and buffers by their names in safetensors, except those of quantized models,
whose scales are stored separately."""
