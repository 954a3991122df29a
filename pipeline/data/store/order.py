"""The order of rows: a permutation of each file, computed position by position, mixed by weight."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

ROUNDS = 6
"""Four rounds give a pseudo-random permutation (Luby & Rackoff 1988)."""

_MASK = 2**64 - 1


class Permutation:
    """The numbers below `size` in an order that follows from `key`.

    A Feistel network on the smallest even number of bits that holds them, repeated until the result
    is below `size` (cycle walking: Black & Rogaway 2002). It needs no memory.
    """

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._keys = [
            int.from_bytes(hashlib.blake2b(f"{key} {n}".encode(), digest_size=8).digest(), "little")
            for n in range(ROUNDS)
        ]

    def __getitem__(self, position: int) -> int:
        """The number at a position.

        Raises:
            IndexError: there is no such position.
        """
        if not 0 <= position < self.size:
            raise IndexError(f"position {position} of {self.size}")
        number = self._encrypt(position)
        while number >= self.size:
            number = self._encrypt(number)
        return number

    def _encrypt(self, number: int) -> int:
        low = (1 << self._half) - 1
        left, right = number >> self._half, number & low
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & low)
        return left << self._half | right


def _mixed(number: int) -> int:
    """SplitMix64's finalizer."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


class MixedStream:
    """Endless rows of several files in global batches, the same on every process.

    The next row is from the file that is furthest behind its share (Webster's method), so that
    every stretch of rows has the mixture. A file gives its rows in a random order, and starts
    again in another order when all have been used.

    Args:
        sizes: rows of each file.
        weights: share of each file in the mixture, relative to the others.
        batch_size: rows of a global batch.
        seed: seed of the orders.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], *, batch_size: int, seed: int
    ) -> None:
        self.sizes, self.weights = sizes, weights
        self.batch_size, self.seed = batch_size, seed
        self.taken = [0] * len(sizes)
        """Rows used of each file so far, over all passes."""
        self._orders: dict[int, tuple[int, Permutation]] = {}

    @property
    def num_rows(self) -> int:
        """Rows until the file that is shortest for its weight has been used once."""
        rows = min(size / weight for size, weight in zip(self.sizes, self.weights, strict=True))
        return max(1, round(rows * sum(self.weights)))

    def num_steps(self, epochs: float, max_steps: int | None) -> int:
        """Batches of a run: `max_steps`, or those of `epochs` times `num_rows`, rounded up."""
        return max_steps or math.ceil(epochs * self.num_rows / self.batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self

    def __next__(self) -> list[tuple[int, int]]:
        """(file, row) of a global batch."""
        return [self._next_row() for _ in range(self.batch_size)]

    def _next_row(self) -> tuple[int, int]:
        behind = [
            (taken + 0.5) / weight for taken, weight in zip(self.taken, self.weights, strict=True)
        ]
        file = behind.index(min(behind))
        number, position = divmod(self.taken[file], self.sizes[file])
        self.taken[file] += 1
        order = self._orders.get(file)
        if order is None or order[0] != number:
            order = number, Permutation(self.sizes[file], f"{self.seed} pass {number} file {file}")
            self._orders[file] = order
        return file, order[1][position]

    def state_dict(self) -> dict[str, Any]:
        """Position of the stream."""
        return {"taken": list(self.taken)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of another stream of the same files, weights and seed."""
        self.taken = list(state["taken"])
