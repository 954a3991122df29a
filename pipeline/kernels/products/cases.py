"""Cases of products of bf16 matrices: what is timed."""

from collections.abc import Iterator, Sequence

import torch

from pipeline.kernels.products import cpu, dispatch
from pipeline.kernels.timing import Sizes, Timed, by_kernel
from pipeline.kernels.toolchain.cpp import Built, NotBuiltError

INPUTS, OUTPUTS = 1024, 1024


def timed(devices: Sequence[torch.device], sizes: Sizes) -> Iterator[Timed]:
    """A linear layer of a sequence, on the CPU."""
    del devices
    x, weight = (torch.randn(rows, INPUTS).bfloat16() for rows in (sizes.tokens, OUTPUTS))
    found = cpu.library() if cpu.is_needed() else "the processor has instructions for them"

    out = torch.empty(sizes.tokens, OUTPUTS, dtype=torch.bfloat16)

    def ours() -> None:
        assert isinstance(found, Built)
        matrices = x[None], weight.T[None], None, out[None]
        cpu.multiply(*matrices, alpha=1.0, beta=1.0, built=found)

    def plain() -> None:
        with dispatch.suspended():
            torch.mm(x, weight.T)

    yield by_kernel(
        f"product on cpu, {sizes.tokens} x {INPUTS} x {OUTPUTS}, bfloat16",
        str(found) if isinstance(found, NotBuiltError) else found,
        ours,
        plain,
    )
