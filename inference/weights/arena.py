"""Memory for many tensors that comes and goes as a whole, in blocks of a size that is found again.

An allocator that has given one large block away in pieces has no place for it any more, though all
of its bytes are free; one of these finds a place wherever as much lies together.
"""

from dataclasses import dataclass

import torch
from jaxtyping import UInt8
from torch import Tensor

from pipeline.models.attention import round_up

ALIGNMENT = 64
"""Bytes: each tensor begins at a cache line."""

BLOCK_BYTES = 128 * 2**20
"""Bytes of a block at most, unless one tensor alone has more."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies."""

    block: int
    start: int
    num_bytes: int


class Arena:
    """Blocks of memory, of which tensors are given places before there is any."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._blocks: list[UInt8[Tensor, " n"]] | None = None

    def reserve(self, num_bytes: int) -> Place:
        """The place of one more tensor."""
        start = round_up(self._sizes[-1], ALIGNMENT) if self._sizes else 0
        if not self._sizes or start + num_bytes > BLOCK_BYTES:
            self._sizes.append(0)
            start = 0
        self._sizes[-1] = start + num_bytes
        return Place(len(self._sizes) - 1, start, num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks, whether there is memory for them or not."""
        return sum(self._sizes)

    @property
    def there(self) -> bool:
        """Whether there is memory."""
        return self._blocks is not None

    def allocate(self, device: torch.device) -> None:
        """Have memory, of undefined content."""
        self._blocks = [torch.empty(n, dtype=torch.uint8, device=device) for n in self._sizes]

    def release(self) -> None:
        """Give the memory back, once no tensor refers to it."""
        self._blocks = None

    def at(self, place: Place) -> UInt8[Tensor, " n"]:
        """The bytes of a place."""
        assert self._blocks is not None
        return self._blocks[place.block][place.start : place.start + place.num_bytes]
