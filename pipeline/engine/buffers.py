"""Memory that collectives read or write, used again as soon as nobody reads it."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.engine.comm import Collectives


@dataclass
class _Free:
    """A buffer that nobody has borrowed."""

    buffer: Tensor
    since: int
    """The meeting after which the others may still have read it."""

    zero: bool = False


class BufferPool:
    """Flat buffers by size and type. All processes borrow and give back in the same order."""

    def __init__(self, comm: Collectives, device: torch.device) -> None:
        self.comm = comm
        self.device = device
        self._free: dict[tuple[int, torch.dtype], list[_Free]] = {}
        self._made: Counter[tuple[int, torch.dtype]] = Counter()

    def borrow(self, numel: int, dtype: torch.dtype, *, at_most: int, zero: bool = False) -> Tensor:
        """A buffer, full of zeros or of undefined content.

        Rather than make more than `at_most` it waits until the other processes have read one.
        """
        kind = (numel, dtype)
        free = self._free.setdefault(kind, [])
        if free and self._made[kind] >= at_most and not any(map(self._read, free)):
            self.comm.meet()
        for index, each in enumerate(free):
            if self._read(each):
                del free[index]
                return each.buffer.zero_() if zero and not each.zero else each.buffer
        self._made[kind] += 1
        buffer = self.comm.empty(numel, dtype, self.device)
        return buffer.zero_() if zero and not self.comm.starts_zero else buffer

    def give_back(self, buffer: Tensor) -> None:
        """The buffer may be used again, once the other processes have read their pieces of it."""
        self._free[buffer.numel(), buffer.dtype].append(_Free(buffer, self.comm.meeting))

    def release(self) -> None:
        """Give the memory of all free buffers back until they are borrowed again."""
        free = [each for kind in self._free.values() for each in kind]
        if not all(map(self._read, free)):
            self.comm.meet()
        if not self.comm.starts_zero:
            self._free.clear()
            self._made.clear()
            return
        for each in free:
            each.zero = self.comm.release(each.buffer) or each.zero

    def _read(self, free: _Free) -> bool:
        return self.comm.has_been_read(free.since)

    @property
    def num_bytes(self) -> int:
        """Of the buffers that lie here."""
        return sum(each.buffer.nbytes for kind in self._free.values() for each in kind)
