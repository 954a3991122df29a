"""The calls of `cpu.cpp`."""

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pipeline.kernels.build import FUSED, NUMBERS, Built, NotBuiltError, bf16_flags, found, parallel

SOURCE = Path(__file__).with_name("cpu.cpp")
MOST_SIZE = 256
"""Largest head size, as in the source."""


class Attention(ctypes.Structure):
    """Arguments of a call; the source has the same structure."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "lengths")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "width", "size")),
        *((name, ctypes.c_int64) for name in ("query_row", "query_head")),
        *((name, ctypes.c_int32) for name in ("next_slot", "window")),
        ("scaling", ctypes.c_float),
    ]


def refusals(
    query: Float[Tensor, "B H D"], key: Float[Tensor, "S G M D"], value: Float[Tensor, "S G M E"]
) -> Iterator[str]:
    """Why the kernel doesn't support these tensors, in clauses."""
    size = query.shape[2]
    if query.dtype not in NUMBERS:
        yield f"it supports fp32 and bf16, not {query.dtype}"
    if not query.dtype == key.dtype == value.dtype:
        yield f"the query is {query.dtype}, keys {key.dtype} and values {value.dtype}"
    if size != value.shape[3] or size != key.shape[3]:
        yield f"keys have heads of size {key.shape[3]} and values of {value.shape[3]}"
    unit = 4 // query.element_size() or 1
    if not 0 < size <= MOST_SIZE or size % unit:
        even = "even " if unit == 2 else ""
        yield f"it supports {even}head sizes up to {MOST_SIZE}, not {size}"
    if not key.is_contiguous() or not value.is_contiguous() or query.stride(2) != 1:
        yield "the numbers of a head are not contiguous"
    if any(tensor.data_ptr() % tensor.element_size() for tensor in (query, key, value)):
        yield "a tensor is not aligned to its elements"


@dataclass(frozen=True)
class Prepared:
    """Attention on fixed memory, which can be called any number of times."""

    built: Built
    call: Attention
    tensors: tuple[Tensor, ...]
    """Keep the memory that `call` points to alive."""

    def __call__(self, lengths: Int[Tensor, " B"]) -> None:
        """Attend to the memory's current contents; a length is one past a row's last key."""
        self.call.lengths = lengths.data_ptr()
        self.built.library.decode_attention(
            ctypes.byref(self.call), parallel(), ctypes.c_int32(torch.get_num_threads())
        )


def prepare(
    query: Float[Tensor, "B H D"],
    key: Float[Tensor, "S G M D"],
    value: Float[Tensor, "S G M D"],
    out: Float[Tensor, "B H D"],
    *,
    scaling: float,
    sliding_window: int | None,
    built: Built,
    one_sequence: bool = False,
) -> Prepared:
    """Return the call on these tensors, without checking them.

    With `one_sequence` all rows see the first slot, else each row its own.
    """
    call = Attention(
        query=query.data_ptr(),
        key=key.data_ptr(),
        value=value.data_ptr(),
        out=out.data_ptr(),
        rows=query.shape[0],
        heads=query.shape[1],
        kv_heads=key.shape[1],
        width=key.shape[2],
        size=query.shape[2],
        query_row=query.stride(0),
        query_head=query.stride(1),
        next_slot=0 if one_sequence else 1,
        window=sliding_window or 0,
        scaling=scaling,
    )
    return Prepared(built, call, (query, key, value, out))


@functools.cache
def library(dtype: torch.dtype) -> Built | NotBuiltError:
    """The kernel for this dtype, or why it can't be built."""
    return found(SOURCE, {"NUMBER": NUMBERS[dtype]}, (*FUSED, *bf16_flags()))
