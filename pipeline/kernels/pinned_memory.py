"""Pinned host memory, allocated in whole pages.

PyTorch rounds pinned allocations up to powers of two, which can double the optimizer's memory.
"""

import ctypes
import functools
import logging
import mmap
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

PORTABLE = 1
"""cudaHostRegisterPortable: pages are locked for all contexts."""


class PinnedMemory:
    """Locked pages of one process.

    Freed pages are kept for the next tensor of their size: locking takes a fifth of a second per
    GB, and gradients are allocated in every step. A tensor may be freed once its copies are done.
    `register` locks pages, given address, size and flags, and returns 0 on success.
    """

    def __init__(
        self, register: Callable[[int, int, int], Any], unregister: Callable[[int], Any]
    ) -> None:
        self._register, self._unregister = register, unregister
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
        self._lock = threading.RLock()  # any thread may free a tensor

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialized vector.

        Raises:
            OSError: memory ran out, or the driver can't lock more pages.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        size = numel * dtype.itemsize
        pages = self._acquire(size + -size % mmap.PAGESIZE)
        buffer = (ctypes.c_byte * size).from_buffer(pages)
        # Only the tensor refers to `buffer`.
        weakref.finalize(buffer, self._release, pages).atexit = False
        return torch.frombuffer(buffer, dtype=dtype, count=numel)

    def free_unused(self) -> None:
        """Return unused pages to the system."""
        with self._lock:
            unused = [pages for same_size in self._free.values() for pages in same_size]
            self._free.clear()
        for pages in unused:
            self._unregister(_address(pages))
            pages.close()

    def _acquire(self, num_bytes: int) -> mmap.mmap:
        with self._lock:
            if self._free[num_bytes]:
                return self._free[num_bytes].pop()
        try:
            return self._allocate(num_bytes)
        except OSError:
            self.free_unused()
            return self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> mmap.mmap:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        code = int(self._register(_address(pages), num_bytes, PORTABLE))
        if code:
            raise OSError(f"the CUDA driver can't lock {num_bytes} bytes (error {code})")
        return pages

    def _release(self, pages: mmap.mmap) -> None:
        with self._lock:
            self._free[len(pages)].append(pages)


def _address(pages: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_byte.from_buffer(pages))


def pinned_empty(numel: int, dtype: torch.dtype) -> Tensor:
    """Allocate a pinned vector, with PyTorch's allocator if the driver can't lock pages.

    Raises:
        RuntimeError: there is no memory to pin.
    """
    # Makes the CUDA context current in this thread, which may be one of autograd's.
    torch.cuda.current_stream().query()
    try:
        return _memory().empty(numel, dtype)
    except OSError as error:
        _log_fallback(str(error))
    return torch.empty(numel, dtype=dtype, pin_memory=True)


@functools.cache
def _memory() -> PinnedMemory:
    runtime: Any = torch.cuda.cudart()
    return PinnedMemory(runtime.cudaHostRegister, runtime.cudaHostUnregister)


@functools.cache
def _log_fallback(reason: str) -> None:
    logger.warning("using PyTorch's pinned memory, rounded up to powers of two: %s", reason)
