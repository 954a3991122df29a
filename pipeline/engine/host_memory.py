"""Main memory that stays with the process when tensors are freed."""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Numbers of the settings that `mallopt` takes, from glibc's malloc.h."""

OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")
"""Variables of the environment by which a user tells glibc what to keep."""


def keep_freed_memory() -> bool:
    """Have malloc use freed memory again instead of giving it back to the system.

    By default large tensors and the top of the heap go back as soon as they are freed, and every
    page of the next step's activations is faulted in and zeroed anew: a tenth of a step on a CPU.
    It holds for the whole process, which keeps the size of its highest moment, and that a tenth
    larger where tensors of different sizes leave holes.

    Returns:
        False where malloc isn't glibc's, or where the environment has settings of the user's own.
    """
    if any(name in os.environ for name in OWN_SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))
