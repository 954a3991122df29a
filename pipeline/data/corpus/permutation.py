"""A random order of any number of things, of which each place is computed by itself.

So the order of 10^11 windows takes no memory, and a run goes on from a number.
"""

import hashlib

ROUNDS = 6
"""A permutation of four rounds can't be told from a random one (Luby & Rackoff 1988)."""

_MASK = 2**64 - 1


class Permutation:
    """The numbers below `size` in an order that follows from `key` alone.

    A Feistel network on the smallest even number of bits that holds them, walked until it gives one
    of them (cycle walking: Black & Rogaway 2002): less than four turns on the average.
    """

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._keys = [
            int.from_bytes(hashlib.blake2b(f"{key} {n}".encode(), digest_size=8).digest(), "little")
            for n in range(ROUNDS)
        ]

    def __getitem__(self, place: int) -> int:
        """The number at a place.

        Raises:
            IndexError: there is no such place.
        """
        if not 0 <= place < self.size:
            raise IndexError(f"place {place} of {self.size}")
        number = self._encrypt(place)
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
    """64 bits of which each depends on all of `number`'s: the finalizer of SplitMix64."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
