"""Cases of linear layers of few rows: what is timed."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from pipeline.kernels.linear import dispatch
from pipeline.kernels.timing import Sizes, Timed, by_kernel, name_of
from pipeline.kernels.toolchain.cpp import Built

ROWS, INPUTS, OUTPUTS = 16, 1024, 4096


def timed(devices: Sequence[torch.device], sizes: Sizes) -> Iterator[Timed]:
    """A layer of a decoding step, on the CPU."""
    del devices, sizes
    for dtype in (torch.float32, torch.bfloat16):
        yield _timed(dtype)


def _timed(dtype: torch.dtype) -> Timed:
    found = dispatch.library(dtype)
    x, weight = (torch.randn(rows, INPUTS).to(dtype) for rows in (ROWS, OUTPUTS))
    out = torch.empty(ROWS, OUTPUTS, dtype=dtype)

    def ours() -> None:
        assert isinstance(found, Built)
        dispatch.make(found, x, weight, None, out)()

    def plain() -> None:
        F.linear(x, weight)

    return by_kernel(
        f"linear layer on cpu, {ROWS} x {INPUTS} x {OUTPUTS}, {name_of(dtype)}",
        found if isinstance(found, Built) else str(found),
        ours,
        plain,
    )
