"""What `python -m pipeline.kernels` times: an operator in up to three ways, on this machine."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pipeline.errors import require
from pipeline.kernels.toolchain.cpp import Built, NotBuiltError
from pipeline.kernels.toolchain.gpu import Gpu

NO_GPU = "its kernel is for GPUs, and PyTorch finds none here"

Found = Built | Gpu | NotBuiltError | str
"""A kernel, or why there is none."""


@dataclass(frozen=True)
class Sizes:
    """How much is computed in each timed call."""

    elements: int = 4_000_000
    """Elements of AdamW's vectors."""

    tokens: int = 512
    """Tokens of the log-probabilities, and of a sequence."""

    def __post_init__(self) -> None:
        for name in ("elements", "tokens"):
            value = getattr(self, name)
            require(value > 0, f"--{name} must be above 0, got {value}")


@dataclass(frozen=True, kw_only=True)
class Timed:
    """An operator on this machine, with some tensors."""

    name: str
    state: str
    """What does it here."""

    ours: Callable[[], object] | None = None
    """As it is done here; None is by the definition."""

    without: Callable[[], object] | None = None
    """Without the kernel, if that is something else than the definition."""

    definition: Callable[[], object] | None = None
    """None where there is nothing to time."""


def by_kernel(
    name: str,
    found: Built | Gpu | str,
    ours: Callable[[], object],
    definition: Callable[[], object],
) -> Timed:
    """An operator of generation, which PyTorch does by the definition where there is no kernel."""
    there = not isinstance(found, str)
    return Timed(
        name=name, state=describe(found), ours=ours if there else None, definition=definition
    )


def describe(found: Found) -> str:
    """How a kernel came about, or why it didn't."""
    if isinstance(found, (NotBuiltError, str)):
        return f"PyTorch instead: {found}"
    if isinstance(found, Gpu):
        return f"built for {found.architecture}"
    if found.seconds is None:
        return f"kept as {found.path.name if found.path else ''}"
    where = "for this process alone" if found.path is None else f"and kept as {found.path.name}"
    return f"built in {found.seconds:.2f} s by {found.compiler}, {where}"


def name_of(dtype: torch.dtype) -> str:
    """The name of a type in a sentence."""
    return str(dtype).removeprefix("torch.")
