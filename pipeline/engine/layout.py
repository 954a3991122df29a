"""How long flat vectors are, so that cutting them among processes changes no bit."""

import math

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


def padded_size(numel: int, world_size: int) -> int:
    """The next size that can be cut into stretches that the optimizer updates alike."""
    unit = num_chunks(world_size) * ALIGNMENT
    return -(-numel // unit) * unit
