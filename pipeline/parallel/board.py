"""The last collectives of each process of a machine, where the others can read them.

Every engine has meetings of its own. Of two processes that use two engines in another order each
would wait for the other, at different meetings, until the timeout. Here stands what a process does
in all engines, and outside of them, so that it is found as soon as one waits.
"""

import functools
import mmap
import os
from collections.abc import Iterator

from pipeline.parallel.group import Group
from pipeline.position import HERE, Collective

SLOTS = 64
"""Collectives that can be read: a process comes to no more before it waits for the others."""

LABEL_BYTES = 184
SLOT_BYTES = 8 + LABEL_BYTES


class Board:
    """The boards of a group's processes, on one machine; all construct it together."""

    def __init__(self, group: Group) -> None:
        offers = group.gather_objects((os.getpid(), _own_board().descriptor))
        self._of_rank = [_opened(pid, descriptor) for pid, descriptor in offers]

    def difference(self, other: int) -> tuple[str, str] | None:
        """What this process did and what another one did in its place, if they parted."""
        own = {each.number: _encoded(each) for each in HERE.history()[-SLOTS:]}
        for number, label in _read(self._of_rank[other]):
            if own.get(number, label) != label:
                return _shown(own[number]), _shown(label)
        return None


class _OwnBoard:
    """Where this process says what it does; it lasts as long as the process."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("collectives", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, SLOTS * SLOT_BYTES)
        slots = _slots(memoryview(mmap.mmap(self.descriptor, SLOTS * SLOT_BYTES)))
        self._slots = [(slot[:8].cast("q"), slot[8:]) for slot in slots]
        HERE.listeners.append(self._write)

    def _write(self, collective: Collective) -> None:
        """The number comes last, so that who reads it reads the label that belongs to it."""
        number, label = self._slots[collective.number % SLOTS]
        number[0] = 0
        label[:] = _encoded(collective)
        number[0] = collective.number


@functools.cache
def _own_board() -> _OwnBoard:
    return _OwnBoard()


def _opened(pid: int, descriptor: int) -> memoryview:
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return memoryview(mmap.mmap(opened, SLOTS * SLOT_BYTES))
    finally:
        os.close(opened)


def _read(board: memoryview) -> Iterator[tuple[int, bytes]]:
    """Number and label of each collective that stands there whole, the first one first."""
    for slot in sorted(_slots(board), key=_number):
        number, label = _number(slot), bytes(slot[8:])
        if number and number == _number(slot):
            yield number, label


def _slots(board: memoryview) -> list[memoryview]:
    return [board[n * SLOT_BYTES : (n + 1) * SLOT_BYTES] for n in range(SLOTS)]


def _number(slot: memoryview) -> int:
    return slot[:8].cast("q")[0]


def _encoded(collective: Collective) -> bytes:
    return str(collective).encode()[:LABEL_BYTES].ljust(LABEL_BYTES)


def _shown(label: bytes) -> str:
    return label.decode(errors="replace").strip()
