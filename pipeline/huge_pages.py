"""Memory that is read all over at once, in pages of 2 MiB where the system has them."""

import ctypes
import mmap
import sys

from jaxtyping import Shaped
from torch import Tensor

HUGE_PAGE = 2 * 2**20
"""Bytes. With ordinary pages a core looks up the place of every 4 KiB that it reads."""


def zeros_like(states: Tensor, *shape: int) -> Shaped[Tensor, "..."]:
    """Zeros of this shape, of the number format and on the device of `states`.

    The system is asked for huge pages before the memory is written to, which is when it decides; if
    it has none, or they are switched off, the memory is as any other.
    """
    if states.device.type != "cpu":
        return states.new_zeros(shape)
    found = states.new_empty(shape)
    _ask_for_huge_pages(found)
    return found.zero_()


def _ask_for_huge_pages(tensor: Tensor) -> None:
    """Of those that lie wholly within a tensor's memory."""
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    start = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE * HUGE_PAGE
    if start < end:
        # A refusal changes nothing.
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE
        )
