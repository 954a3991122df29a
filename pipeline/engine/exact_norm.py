"""A gradient norm whose bits depend on the gradient alone, not on what vector an element lies in.

Sums in floating point are rounded as the elements lie. Here each square is rounded by itself, to
`BITS` bits below the square of the largest element of all, and the sum of these is exact: it is an
integer, which any number of processes adds up in any order.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from jaxtyping import Float
from torch import Tensor

BLOCK = 65536
"""Elements that are brought to fp64 at once, 512 KiB: their rounded squares add up exactly."""

HIGH = 34
"""Bits of a square's upper part: a block of these has no more than 52 (2^18 of them would)."""

BITS = 2 * HIGH
"""Bits that are kept of a square, counted down from that of the largest element."""

LIMB = 32
"""Bits of the whole numbers in fp64 that an integer travels as; so many processes' add up."""

LIMBS = 4
"""Limbs of an integer: 2^60 squares have room in them."""


def largest_of(gradient: Float[Tensor, " n"]) -> float:
    """The largest magnitude; infinite where an element is not finite."""
    if gradient.numel() == 0:
        return 0.0
    low, high = (each.item() for each in gradient.aminmax())
    found = max(-low, high)
    return found if math.isfinite(low) and math.isfinite(high) else math.inf


def rounded_squares(gradient: Float[Tensor, " n"], largest: float) -> int:
    """The sum of the rounded squares, in units of 2^-BITS of the power of two above `largest`^2.

    Args:
        gradient: in fp32.
        largest: a bound of all magnitudes, the same for all vectors whose sums are added.
    """
    if largest == 0.0:
        return 0
    _, exponent = math.frexp(largest)
    high, low = 1.5 * 2.0 ** (52 - HIGH), 1.5 * 2.0 ** (52 - BITS)
    squares = torch.empty(BLOCK, dtype=torch.float64, device=gradient.device)
    upper, total = torch.empty_like(squares), 0
    for part in gradient.split(BLOCK):
        lower, rounded = squares[: len(part)].copy_(part), upper[: len(part)]
        lower.mul_(2.0**-exponent).square_()  # exact: 48 bits of at most 1
        # Added to a large number and taken from it again, a number is rounded to multiples.
        torch.add(lower, high, out=rounded).sub_(high)
        lower.sub_(rounded).add_(low).sub_(low)
        sums = torch.stack([rounded.sum(), lower.sum()]).tolist()
        total += (int(sums[0] * 2.0**HIGH) << HIGH) + int(sums[1] * 2.0**BITS)
    return total


def to_limbs(total: int) -> list[float]:
    """An integer as numbers of fp64 that processes add up exactly, the lowest first."""
    return [float(total >> (LIMB * at) & (2**LIMB - 1)) for at in range(LIMBS)]


def norm_of(limbs: Sequence[float], largest: float) -> float:
    """The norm, from the limbs of all vectors of all processes, added up."""
    if largest == 0.0:
        return 0.0
    total = sum(int(limb) << (LIMB * at) for at, limb in enumerate(limbs))
    _, exponent = math.frexp(largest)
    # Rounded once before the root: `float` of a fraction is.
    return math.sqrt(float(Fraction(total, 2**BITS))) * 2.0**exponent
