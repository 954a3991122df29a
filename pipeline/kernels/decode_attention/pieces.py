"""How many keys PyTorch's attention adds up in one go on this machine.

It goes through keys in blocks of 512. The values of a block are summed by a matrix product of the
library under PyTorch, which cuts long sums into pieces: each is added up in the order of its keys,
then the pieces are. Where it cuts depends on the processor and on how many keys there are; with a
whole number of pieces, or all of a block, it does not depend on how many there are.
"""

import functools

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

BLOCK = 512
"""Keys that share a maximum, and a product."""

PIECES = (192, 256)
"""Lengths of a piece that are known, in fp32: MKL's on AMD's Zen 5, and on a processor with AVX-512
but without instructions for bf16, where a whole block is halved."""

ROWS, SIZE = 32, 64
"""Tokens that ask in the probe, as a single one would not do, and numbers of a head."""


@functools.cache
def piece() -> int:
    """Keys whose values are added up in one go in fp32.

    PyTorch is asked, with values whose sum comes out otherwise in every other order. Where no
    length that is known fits, it is the first: no other would be more right.
    """
    with torch.device("cpu"), torch.inference_mode():  # another may be the default
        value = probe()
        query = torch.zeros(1, 1, ROWS, SIZE)  # so that all weights are 1
        out = F.scaled_dot_product_attention(query, torch.zeros(1, 1, BLOCK, SIZE), value)
        sums = out[0, 0, 0] * BLOCK
        return next(
            (each for each in PIECES if torch.equal(sum_of(value[0, 0], each), sums)), PIECES[0]
        )


def whole_pieces(length: int) -> int:
    """The smallest number of keys from `length` on that are added up in no other pieces."""
    last = (length - 1) % BLOCK + 1
    return length + (2 * piece() - last if piece() < last < 2 * piece() else 0)


def probe() -> Float[Tensor, "1 1 BLOCK SIZE"]:
    """Values of which half are large and cancel each other in pairs."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(BLOCK, SIZE, generator=generator)
    pairs = torch.randperm(BLOCK, generator=generator)[: BLOCK // 2].view(2, -1)
    large = 2.0 ** torch.randint(8, 22, (pairs.shape[1], SIZE), generator=generator)
    value[pairs[0]], value[pairs[1]] = large, -large
    return value[None, None]


def sum_of(values: Float[Tensor, "K E"], length: int) -> Float[Tensor, " E"]:
    """One after the other within pieces of this length, then the pieces."""
    total = torch.zeros_like(values[0])
    for part in values.split(length):
        sum_of_part = torch.zeros_like(total)
        for row in part:
            sum_of_part += row
        total += sum_of_part
    return total
