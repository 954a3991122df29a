"""One number that tells two sets of weights apart.

The bits of each weight are read in words of 64, row by row, and added modulo 2^64: in any order, so
that the parts of a weight that is divided among processes add up to the same. The sums are then
mixed by the names of their weights. It is as fast as reading memory, and no cryptographic hash.
"""

import hashlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Int64, Shaped
from torch import Tensor, nn

BITS = 52
"""Bits of a hash: as many as a JSON number keeps in every language."""

WORD = 8
"""Bytes of a word."""


def bits_sum(weight: Shaped[Tensor, "*S"], *, first: int = 0) -> Int64[Tensor, ""]:
    """The words of a weight, read as signed integers, added up modulo 2^64.

    Each row of the last dimension is filled up with zeros to whole words. Of a part of a weight,
    `first` is where its rows begin in the whole ones.
    """
    weight = weight.detach()
    if weight.ndim == 0:
        weight = weight[None]
    per_word = WORD // weight.element_size()
    before = first % per_word
    after = -(before + weight.shape[-1]) % per_word
    in_words = weight.is_contiguous() and weight.storage_offset() % per_word == 0
    if before or after or not in_words:
        weight = F.pad(weight, (before, after)).contiguous()
    return weight.view(torch.int64).sum()


def hash_of_sums(names: Sequence[str], sums: Int64[Tensor, " n"]) -> int:
    """The hash of weights of these names and these `bits_sum`; below 2^52."""
    total = sum(_factor(name) * each for name, each in zip(names, sums.tolist(), strict=True))
    return total % 2**64 >> (64 - BITS)


def weights_hash(model: nn.Module) -> int:
    """The hash of a model's parameters; a tied one counts once, under its first name."""
    named = dict(model.named_parameters())
    return hash_of_sums(list(named), torch.stack([bits_sum(param) for param in named.values()]))


def _factor(name: str) -> int:
    """An odd number of 64 bits: a change of any bit of the sum changes the product."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1
