"""Numbers in shared memory that a process can sleep for until another one changes them: futex(2).

Who polls takes time from the process it waits for, where there are more processes than cores; who
sleeps a while wakes too late.
"""

import ctypes
import errno

WAIT, WAKE = 0, 1
SYSTEM_CALL = 202
"""Of x86-64."""

ALL_WAITERS = 2**31 - 1
LOW_HALF = 2**32 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """An int64 that other processes map too; the kernel compares its low half."""

    def __init__(self, memory: memoryview) -> None:
        self._low = ctypes.c_uint32.from_buffer(memory)
        self._address = ctypes.c_void_p(ctypes.addressof(self._low))
        self._system_call = ctypes.CDLL(None, use_errno=True).syscall

    def wait(self, seen: int, *, seconds: float) -> bool:
        """Sleep while the number is `seen`; False if so many seconds have passed with it."""
        whole, part = divmod(int(seconds * 1e9), 10**9)
        timeout = ctypes.byref(_Timespec(whole, part))
        expected = ctypes.c_uint32(seen & LOW_HALF)
        failed = self._system_call(SYSTEM_CALL, self._address, WAIT, expected, timeout, None, 0)
        return not (failed and ctypes.get_errno() == errno.ETIMEDOUT)

    def wake(self) -> None:
        """Wake all who wait for it, after it was changed."""
        waiters = ctypes.c_int(ALL_WAITERS)
        self._system_call(SYSTEM_CALL, self._address, WAKE, waiters, None, None, 0)
