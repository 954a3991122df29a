"""Memory that collectives read or write, used again as soon as nobody reads it."""

from collections import Counter

import torch
from torch import Tensor

from pipeline.engine.comm import Collectives


class BufferPool:
    """Flat buffers by size and type. All processes borrow and give back in the same order."""

    def __init__(self, comm: Collectives, device: torch.device) -> None:
        self.comm = comm
        self.device = device
        self._free: dict[tuple[int, torch.dtype], list[tuple[int, Tensor]]] = {}
        self._made: Counter[tuple[int, torch.dtype]] = Counter()

    def borrow(self, numel: int, dtype: torch.dtype, *, at_most: int) -> Tensor:
        """A buffer of undefined content.

        Rather than make more than `at_most` it waits until the other processes have read one.
        """
        kind = (numel, dtype)
        free = self._free.setdefault(kind, [])
        if free and self._made[kind] >= at_most and not self._read(free):
            self.comm.meet()
        for index, (released, buffer) in enumerate(free):
            if self.comm.has_been_read(released):
                del free[index]
                return buffer
        self._made[kind] += 1
        return self.comm.empty(numel, dtype, self.device)

    def give_back(self, buffer: Tensor) -> None:
        """The buffer may be used again, once the other processes have read their pieces of it."""
        self._free[buffer.numel(), buffer.dtype].append((self.comm.meeting, buffer))

    def _read(self, free: list[tuple[int, Tensor]]) -> bool:
        return any(self.comm.has_been_read(released) for released, _ in free)

    @property
    def num_bytes(self) -> int:
        """Of the buffers that lie here."""
        return sum(buffer.nbytes for free in self._free.values() for _, buffer in free)
