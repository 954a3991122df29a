"""Main memory that a GPU reads and writes by itself, in the bytes that are asked for.

PyTorch's own pinned memory comes in powers of two: for masters and moments that are a little more
than one, twice of what a plan counts.
"""

import ctypes
import logging
import mmap
import threading
import weakref
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from pipeline.errors import KernelError
from pipeline.kernels.toolchain.driver import Driver

logger = logging.getLogger(__name__)


class Registers(Protocol):
    """The part of a driver that pages are locked by."""

    def register(self, address: int, num_bytes: int) -> None:
        """Lock pages, for every context of the process."""

    def unregister(self, address: int) -> None:
        """Let them go."""


@dataclass(frozen=True)
class _Block:
    """Pages that are locked."""

    memory: mmap.mmap
    address: int

    @property
    def num_bytes(self) -> int:
        return len(self.memory)


class PinnedMemory:
    """Locked pages of one process.

    What is given back is kept for the next of its size: locking takes a fifth of a second for each
    GB, and gradients come and go with every step. Whoever lets a tensor go has waited for the
    copies to it.
    """

    def __init__(self, driver: Registers) -> None:
        self._driver = driver
        self._free: defaultdict[int, list[_Block]] = defaultdict(list)
        self._lock = threading.RLock()  # a tensor may be let go by any thread, at any moment
        self.num_bytes = 0
        """Of all locked pages, whether lent or kept."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A vector of undefined content.

        Raises:
            KernelError: the driver locks no more pages.
            OSError: there is no memory.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        size = numel * dtype.itemsize
        block = self._take(size + -size % mmap.PAGESIZE)
        lent = (ctypes.c_byte * size).from_buffer(block.memory)
        # The tensor refers to it, and nothing else does.
        weakref.finalize(lent, self._give_back, block).atexit = False
        return torch.frombuffer(lent, dtype=dtype, count=numel)

    def release(self) -> None:
        """Unlock what is kept, and give it back to the system."""
        with self._lock:
            kept = [block for blocks in self._free.values() for block in blocks]
            self._free.clear()
            self.num_bytes -= sum(block.num_bytes for block in kept)
        for block in kept:
            self._driver.unregister(block.address)
            block.memory.close()

    def _take(self, num_bytes: int) -> _Block:
        with self._lock:
            if self._free[num_bytes]:
                return self._free[num_bytes].pop()
        try:
            return self._new(num_bytes)
        except (KernelError, OSError):
            self.release()
            return self._new(num_bytes)

    def _new(self, num_bytes: int) -> _Block:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_byte.from_buffer(memory))
        self._driver.register(address, num_bytes)
        with self._lock:
            self.num_bytes += num_bytes
        return _Block(memory, address)

    def _give_back(self, block: _Block) -> None:
        with self._lock:
            self._free[block.num_bytes].append(block)


def pinned_empty(numel: int, dtype: torch.dtype) -> Tensor:
    """A vector in pinned memory of this process; of PyTorch's own where the driver locks none.

    Raises:
        RuntimeError: there is no memory to pin.
    """
    memory = _memory()
    if memory is not None:
        # For the driver: it makes the GPU's context current in this thread, perhaps autograd's.
        torch.cuda.current_stream().query()
        try:
            return memory.empty(numel, dtype)
        except (KernelError, OSError) as error:
            _log_refused(str(error))
    return torch.empty(numel, dtype=dtype, pin_memory=True)


@cache
def _memory() -> PinnedMemory | None:
    try:
        return PinnedMemory(Driver())
    except KernelError as error:
        _log_refused(str(error))
        return None


@cache
def _log_refused(reason: str) -> None:
    logger.warning("pinned memory comes from PyTorch, in powers of two: %s", reason)
