"""Moments of AdamW in 8 bits: blocks of numbers that share a power of two.

A block is 32 consecutive elements. Beside its codes lies a byte, the exponent of their largest
magnitude; a code is a floating-point number below 2, times that power of two. It is the form of the
OCP Microscaling Formats (Rouhani et al. 2023, MXFP8) with exponents of its own for each moment:

    exp_avg      sign, 4 bits of exponent, 3 of mantissa    2^-14 to 1.875, evenly 2^-17 apart below
    exp_avg_sq         5 bits of exponent, 3 of mantissa    2^-30 to 1.875, evenly 2^-33 apart below

Codes next to each other differ by at most an eighth. A number between two of them becomes the upper
one with the probability at which the mean is the number itself (stochastic rounding), so that what
is stored has the mean of moments in fp32: to the nearest, a second moment would stay what it is
where (1 - beta2) |g^2 / v - 1| is below a sixteenth, whatever the gradients. The random bits are a
hash of both new moments of the element: the same wherever the element lies and whoever updates it.

Error of a number x in a block whose largest is between 2^k and 2^(k+1): below |x| / 8, or below
2^(k-16) (first moment) or 2^(k-32) (second) where |x| is so small that this is more. A second
moment above 0 is never stored as 0, so that a weight never moves by its first moment over `eps`
alone. (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", take blocks of 256, a
table of 256 values and the nearest of them, for whose search a step has no time to spare here.)

Dimension names: n elements, b = ceil(n / 32) blocks.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int32, UInt8
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 32
"""Elements that share an exponent."""

REST_BITS = 20
"""Low bits of fp32's mantissa for which a code has no room."""

REST = 2**REST_BITS - 1
SMALLEST, LARGEST = 64, 253
"""Exponents of blocks, biased by 127: with less, codes would have no normal numbers in fp32."""

NOT_FINITE = 255
"""The exponent of a block with infinity, NaN or a number from 2^127 on: all of it is lost."""


@dataclass(frozen=True)
class Codes:
    """How magnitudes become codes with 3 bits of mantissa."""

    top: int
    """The largest exponent of a code."""

    signed: bool
    """Whether the highest bit is a sign; without one, numbers above 0 have codes above 0."""

    @property
    def even(self) -> float:
        """Below this, in a block whose exponent is 0, codes are evenly apart and begin with 0."""
        return 2.0 ** (1 - self.top)


AVERAGE = Codes(top=15, signed=True)
"""The codes of `exp_avg`."""

SQUARE = Codes(top=31, signed=False)
"""The codes of `exp_avg_sq`."""


def blocks(numel: int) -> int:
    """Blocks of so many elements; the last may have fewer."""
    return -(-numel // BLOCK)


def noise_of(average: Float[Tensor, " n"], square: Float[Tensor, " n"]) -> Int32[Tensor, " n"]:
    """32 random bits for each element: of both moments, mixed as MurmurHash3 ends (Appleby)."""
    other = square.contiguous().view(torch.int32)
    mixed = average.contiguous().view(torch.int32) ^ ((other << 16) | _shifted(other, 16))
    mixed = (mixed ^ _shifted(mixed, 16)) * (0x85EBCA6B - 2**32)
    mixed = (mixed ^ _shifted(mixed, 13)) * (0xC2B2AE35 - 2**32)
    return mixed ^ _shifted(mixed, 16)


def encode(
    values: Float[Tensor, " n"], noise: Int32[Tensor, " n"], codes: Codes
) -> tuple[UInt8[Tensor, " n"], UInt8[Tensor, " b"]]:
    """fp32 as codes and the exponents of their blocks.

    `noise` is that of `noise_of`, whose lower 20 bits the first moment takes, and the upper 20 the
    second.
    """
    numel = values.numel()
    bits = values.contiguous().view(torch.int32)
    magnitudes = bits & 0x7FFFFFFF
    of_block = pad(magnitudes, (0, -numel % BLOCK)).view(-1, BLOCK)
    largest = of_block.amax(dim=1).clamp(max=0x7F000000)
    exponents = ((largest + REST) >> 23).clamp(min=SMALLEST)
    factors = ((254 - exponents.clamp(max=LARGEST)) << 23).view(torch.float32)
    exponents[exponents > LARGEST] = NOT_FINITE

    scaled = magnitudes.view(torch.float32) * _for_each(factors, numel)
    is_even = scaled < codes.even
    finite = torch.where(is_even, scaled + codes.even, scaled).view(torch.int32)
    finite = finite.clamp(max=0x7F800000)
    rest = noise & REST if codes.signed else _shifted(noise, 32 - REST_BITS)
    code = ((finite + rest) >> REST_BITS) - _first(is_even, codes)
    code.clamp_(max=codes.top << 3 | 7)
    if codes.signed:
        code |= (bits >> 24) & 128
    else:
        code[(code == 0) & (bits != 0)] = 1
    return code.to(torch.uint8), exponents.to(torch.uint8)


def decode(
    codes_of: UInt8[Tensor, " n"], exponents: UInt8[Tensor, " b"], codes: Codes
) -> Float[Tensor, " n"]:
    """The numbers that codes stand for, each exactly, in fp32; not finite where a block is lost."""
    code = codes_of.int()
    magnitude = code & 127 if codes.signed else code
    is_even = magnitude < 8
    values = ((magnitude + _first(is_even, codes)) << REST_BITS).view(torch.float32)
    values = torch.where(is_even, values - codes.even, values)
    values = values * _for_each((exponents.int() << 23).view(torch.float32), code.numel())
    if not codes.signed:
        return values
    return (values.view(torch.int32) | ((code & 128) << 24)).view(torch.float32)


def _shifted(bits: Int32[Tensor, " n"], by: int) -> Int32[Tensor, " n"]:
    """The bits shifted to the right, with zeros behind."""
    return (bits >> by) & ((1 << (32 - by)) - 1)


def _first(is_even: Tensor, codes: Codes) -> Tensor:
    """What of fp32's bits, without the rest, code 0 has there."""
    return (127 - codes.top + is_even.int()) << 3


def _for_each(of_block: Tensor, numel: int) -> Tensor:
    return of_block.repeat_interleave(BLOCK)[:numel]
