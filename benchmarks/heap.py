"""What tensors weigh at the highest moment, by a count of every block of the heap.

PyTorch's profiler doesn't hear of tensors that threads of a collective free: of processes that
compute a layer together it sees up to a third too much. So a library that counts in place of
`malloc` and `free` is loaded before all others (`heap.cpp`).
"""

import ctypes
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.memory import live_bytes

LEAST = 16_384
"""Bytes of the smallest block that is counted: tensors of a layer, and not the interpreter's."""


def counting() -> Mapping[str, str]:
    """The environment of a program whose heap is counted.

    Raises:
        NotBuiltError: there is no compiler.
    """
    from pipeline.kernels.toolchain.cpp import build

    library = build(Path(__file__).with_name("heap.cpp"), {"LEAST": LEAST}).library
    return {**os.environ, "LD_PRELOAD": library._name}  # noqa: SLF001


def peak_bytes_of(step: Callable[[], None]) -> float:
    """Most bytes that tensors take at any moment of one step: what lives, and what it allocates.

    In a program that was started with `counting`. Memory that processes share as files is not part
    of the heap: what a step has of it by itself is the caller's to add.
    """
    heap = ctypes.CDLL(None)
    for count in (heap.heap_held, heap.heap_highest):
        count.restype = ctypes.c_long
    before = live_bytes()
    held = heap.heap_held()
    heap.heap_begin()
    step()
    return before + heap.heap_highest() - held
