"""Memory that collectives read or write, used again as soon as nobody reads it."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.engine.comm import Collectives
from pipeline.engine.side_stream import Mark, gradient_copies


@dataclass
class _Buffer:
    """A buffer of the pool."""

    memory: Tensor

    used: int = 0
    """Bytes of it that have been written, and take memory."""

    zero: bool = False

    since: int = 0
    """`Collectives.rendezvous` when it was given back, for `has_been_read`."""

    after: Mark | None = None
    """The moment after which this process has read it."""


class BufferPool:
    """Flat buffers by size and type. All processes borrow and give back in the same order."""

    def __init__(self, comm: Collectives, device: torch.device) -> None:
        self.comm = comm
        self.device = device
        self.copies = gradient_copies(device)
        """Of gradients to main memory."""
        self._free: dict[tuple[int, torch.dtype], list[_Buffer]] = {}
        self._lent: dict[int, _Buffer] = {}
        self._made: Counter[tuple[int, torch.dtype]] = Counter()

    def borrow(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        at_most: int,
        zero: bool = False,
        narrow: torch.dtype | None = None,
    ) -> Tensor:
        """A buffer, full of zeros or of undefined content.

        Rather than make more than `at_most` it waits until the other processes have read one. With
        `narrow`, a smaller type, the elements are of that type and take the start of the buffer;
        each process may choose for itself.
        """
        kind = (numel, dtype)
        free = self._free.setdefault(kind, [])
        if free and self._made[kind] >= at_most and not any(map(self._has_been_read, free)):
            self.comm.meet()
        index = next((n for n, each in enumerate(free) if self._has_been_read(each)), None)
        if index is None:
            self._made[kind] += 1
            memory = self.comm.empty(numel, dtype, self.device)
            buffer = _Buffer(memory, zero=self.comm.starts_zero)
        else:
            buffer = free.pop(index)
            if buffer.after is not None:
                buffer.after.hold_computation()
                buffer.after = None
        view = buffer.memory if narrow is None else buffer.memory.view(narrow)[:numel]
        if zero and not buffer.zero:
            view.zero_()
        buffer.zero = False
        buffer.used = max(buffer.used, view.nbytes)
        self._lent[view.data_ptr()] = buffer
        return view

    def give_back(self, borrowed: Tensor, *, after: Mark | None = None) -> None:
        """The buffer may be used again, once the other processes have read their pieces of it.

        And once `after` has come, on this one.
        """
        buffer = self._lent.pop(borrowed.data_ptr())
        buffer.after = after
        buffer.since = self.comm.rendezvous
        self._free[buffer.memory.numel(), buffer.memory.dtype].append(buffer)

    def release(self) -> None:
        """Give the memory of all free buffers back until they are borrowed again."""
        free = [each for kind in self._free.values() for each in kind]
        if not all(map(self._has_been_read, free)):
            self.comm.meet()
        if not self.comm.starts_zero:
            self._free.clear()
            self._made.clear()
            return
        for each in free:
            if self.comm.release(each.memory):
                each.used, each.zero = 0, True

    def _has_been_read(self, free: _Buffer) -> bool:
        return self.comm.has_been_read(free.since)

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers that lie here."""
        return sum(each.used for kind in self._free.values() for each in kind)
