"""How long flat vectors are, so that cutting them among processes changes no bit."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

ALIGNMENT = 16
"""Cuts of a flat vector at multiples of so many fp32 elements change no bit of an update.

The fused CPU kernels of Adam, AdamW and SGD walk a vector in SIMD lanes of 8 and finish what is
left of it one by one, with other roundings: which elements are left depends on where the vector was
cut. 16 elements are a cache line, at whose multiples the kernels divide a vector among threads. All
other implementations give the same bits at any cut.
"""

CHUNKS = 16
"""Equal stretches of every vector, each summed as one for the gradient norm."""


def num_chunks(world_size: int) -> int:
    """Stretches of every vector; more than CHUNKS only where the processes don't divide it."""
    return math.lcm(CHUNKS, world_size)


def padded_size(numel: int, world_size: int, *, block: int = 1) -> int:
    """The next size that can be cut into stretches that the optimizer updates alike.

    Blocks of `block` elements stay whole.
    """
    unit = num_chunks(world_size) * math.lcm(ALIGNMENT, block)
    return -(-numel // unit) * unit


@dataclass(frozen=True)
class Layout:
    """Where parameters lie in a vector: those that decay, then those that weight decay spares."""

    offsets: Mapping[str, int]
    spared_from: int | None
    """From here on nothing decays; None where all parameters do."""

    used: int
    """Elements up to the end of the last parameter."""


def lay_out(params: Mapping[str, nn.Parameter], *, decays: bool, block: int = 1) -> Layout:
    """One parameter after the other, in their order where none, or all, are spared.

    Each begins at a multiple of `block`, so that its blocks are its own wherever it lies.

    Weight decay spares one-dimensional parameters: biases and norms. They begin where a vector may
    be cut, so that an update of both parts has the bits of one of either.
    """
    spared = {name for name, param in params.items() if param.ndim < 2}
    ordered = sorted(params, key=lambda name: name in spared) if decays else list(params)
    offsets: dict[str, int] = {}
    used = 0
    spared_from: int | None = None if decays else 0
    for name in ordered:
        if decays and spared_from is None and name in spared:
            unit = math.lcm(ALIGNMENT, block)
            used = -(-used // unit) * unit
            spared_from = used
        used = -(-used // block) * block
        offsets[name] = used
        used += params[name].numel()
    return Layout(offsets, spared_from, used)
