"""The emulator detects faults and reports their lines."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.pipeline.kernels.emulator import emulated
from tests.pipeline.kernels.emulator.emulated import Emulator

HEAD = """
#include "prelude.cuh"
struct Params { float* out; const float* in; };
extern "C" __global__ void kernel(Params p) {
  const int thread = threadIdx.x;
  SHARED(float, shared);
"""


class Params(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = (("out", ctypes.c_void_p), ("in", ctypes.c_void_p))


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory of kernel sources."""
    monkeypatch.setattr(emulated, "SOURCES", tmp_path)
    return tmp_path


def run(body: str, sources: Path, emulator: Emulator, *, schedule: int = 0) -> Tensor:
    """Run two blocks of 64 threads with 256 bytes of shared memory and return the output."""
    (sources / "test.cu").write_text(HEAD + body + "\n}\n")
    out, inputs = torch.zeros(64), torch.arange(64.0)
    with emulator.memory(out, inputs, schedule=schedule):
        kernel = emulator.gpu().kernel("test", "kernel", {"BODY": abs(hash(body))})
        params = Params(out.data_ptr(), inputs.data_ptr())
        kernel(params, grid=(2, 1, 1), block=(64, 1, 1), shared_bytes=256)
    return out


FAULTS = {
    "an access outside of all arrays at line 7": "store4(p.out + 64, 0);",
    "a misaligned access of 16 bytes at line 7": "load16(p.in + 1);",
    "deadlock: 31 threads in __shfl_xor_sync at line 7, 1 threads in __syncthreads at line 7": (
        "if (thread == 0) __syncthreads(); else __shfl_xor_sync(~0u, thread, 1);"
    ),
    "in barriers at line 7 and line 8": (
        "if (thread < 32) __syncthreads();\nelse __syncthreads();"
    ),
    "by a lane outside of its mask": "__shfl_xor_sync(0xffff, thread, 1);",
    "reads a lane outside of its mask": (
        "if (thread % 32 < 16) __shfl_xor_sync(0xffff, thread, 16);"
    ),
    "past the end of shared memory": "shared[thread + 1] = 1;",
}


@pytest.mark.parametrize("message", FAULTS)
def test_fault_is_reported_with_its_line(message: str, sources: Path, emulator: Emulator) -> None:
    with pytest.raises(AssertionError, match=message):
        run(FAULTS[message], sources, emulator)
