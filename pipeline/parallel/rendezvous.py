"""Where processes of one machine wait for one another: a control block that all of them map.

A process that comes to a meeting writes a label there, the same on all processes, and counts up;
the others sleep until it does. Who is gone, or has come with another label, is named.
"""

import mmap
import os
import select
import time
import weakref
from collections.abc import Sequence

import torch

from pipeline.parallel.board import Board
from pipeline.parallel.futex import Futex
from pipeline.parallel.group import Group
from pipeline.position import HERE, SAME_ORDER, DesyncError

MOST_AHEAD = 8
"""Meetings that a process may have announced and not waited for."""

POLLS = 20
"""Of another process before this one sleeps until it comes."""

LOOK_SECONDS = 0.02
"""After which a process that waits looks whether the other one is still there."""

SLOTS = 2 * MOST_AHEAD
"""Another process can announce as many meetings before we have read its note of the first."""

LABEL_BYTES = 160
SLOT_BYTES = LABEL_BYTES + 1
ROW_BYTES = 8 + SLOTS * SLOT_BYTES
"""Of a process in the control block: how many meetings it has come to; of the last ones what it
does there, the same on all processes, and a note of its own."""


class ControlBlock:
    """Control block that all processes map: descriptors of chunks, and who is at which meeting."""

    MAX_CHUNKS = 1024

    def __init__(self, memory: mmap.mmap, group: Group) -> None:
        self.group = group
        self.bytes = memoryview(memory)
        self.rows = group.size * ROW_BYTES
        self._fds = self.bytes[self.rows :].cast("q")

    @classmethod
    def size(cls, processes: int) -> int:
        """Bytes of the block."""
        return processes * (ROW_BYTES + 8 * cls.MAX_CHUNKS)

    def publish(self, owner: int, index: int, fd: int) -> None:
        """Tell the others under which descriptor chunk `index` of `owner` can be opened."""
        assert index < self.MAX_CHUNKS  # of 64 MiB or a whole vector each
        self._fds[owner * self.MAX_CHUNKS + index] = fd + 1

    def fd_of(self, owner: int, index: int) -> int:
        """Descriptor of a chunk in its owner's process."""
        fd = self._fds[owner * self.MAX_CHUNKS + index] - 1
        if fd < 0:
            own, theirs = self.group.global_rank, self.group.ranks[owner]
            raise DesyncError(f"rank {theirs} has not set up memory that rank {own} reads")
        return fd


class Rendezvous:
    """Points that every process of a group comes to, in the same order, before any goes on."""

    def __init__(self, table: "ControlBlock", pids: Sequence[int]) -> None:
        self.announced = 0
        self.completed = 0
        self._notes: dict[int, list[int]] = {}
        self.rank, self.ranks = table.group.rank, table.group.ranks
        self.timeout = _timeout_seconds(table.group)
        rows = [table.bytes[n * ROW_BYTES : (n + 1) * ROW_BYTES] for n in range(len(self.ranks))]
        self._counts = [row[:8].cast("q") for row in rows]
        self._futexes = [Futex(row) for row in rows]
        self._slots = [
            [row[8 + n * SLOT_BYTES : 8 + (n + 1) * SLOT_BYTES] for n in range(SLOTS)]
            for row in rows
        ]
        self._board = Board(table.group)
        self._poll = select.poll()
        self._ranks_of: dict[int, int] = {}
        for other, pid in enumerate(pids):
            if other != self.rank:
                pidfd = os.pidfd_open(pid)
                self._ranks_of[pidfd] = other
                self._poll.register(pidfd, select.POLLIN)
        weakref.finalize(self, close_all, list(self._ranks_of))
        self.others = [other for other in range(len(self.ranks)) if other != self.rank]

    def attend(self, label: str) -> None:
        """Wait for the others, who must come with the same label.

        Raises:
            DesyncError: another process came with another label, is gone, or did not come in time.
        """
        self.complete(self.announce(label))

    def announce(self, label: str, *, note: int = 0) -> int:
        """Say what this process does next, and go on; a number for `complete`.

        Raises:
            DesyncError: as `attend`, of a meeting announced long before.
        """
        self._complete_until(self.announced + 1 - MOST_AHEAD)
        self.announced += 1
        slot = self._slots[self.rank][self.announced % SLOTS]
        slot[:LABEL_BYTES] = label.encode()[:LABEL_BYTES].ljust(LABEL_BYTES)
        slot[LABEL_BYTES] = note
        self._counts[self.rank][0] = self.announced
        self._futexes[self.rank].wake()
        return self.announced

    def complete(self, number: int) -> list[int]:
        """Wait for the others at a meeting and those before it; the notes of all processes.

        Raises:
            DesyncError: as `attend`.
        """
        self._complete_until(number)
        return self._notes.pop(number)

    def _complete_until(self, number: int) -> None:
        for each in range(self.completed + 1, number + 1):
            mine = self._slots[self.rank][each % SLOTS]
            for other in self.others:
                if self._counts[other][0] < each:
                    self._wait(other, each)
                # It is less than `SLOTS` meetings ahead: its note of this one still stands.
                if self._slots[other][each % SLOTS][:LABEL_BYTES] != mine[:LABEL_BYTES]:
                    raise DesyncError(
                        f"{self._name(self.rank)} came to {self._label(self.rank, each)} while"
                        f" {self._name(other)} came to {self._label(other, each)}; {SAME_ORDER}"
                    )
            self.completed = each
            self._notes[each] = [slots[each % SLOTS][LABEL_BYTES] for slots in self._slots]

    def _wait(self, other: int, number: int) -> None:
        counts = self._counts[other]
        polls = 0
        start = time.perf_counter()
        deadline = time.monotonic() + self.timeout
        HERE.waits_for = (self.ranks[other],)
        while counts[0] < number:
            polls += 1
            if polls < POLLS:
                os.sched_yield()
                continue
            seen = counts[0]
            if seen < number and not self._futexes[other].wait(seen, seconds=LOOK_SECONDS):
                self._look_after(other, number, deadline)
        HERE.waits_for = ()
        HERE.add_wait(time.perf_counter() - start)

    def _look_after(self, other: int, number: int, deadline: float) -> None:
        label = self._label(self.rank, number)
        own, theirs = self._name(self.rank), self._name(other)
        gone = [self._ranks_of[pidfd] for pidfd, _ in self._poll.poll(0)]
        # First what it did otherwise: it may have found that out as well, and ended.
        parted = self._board.difference(other)
        if parted is not None:
            here, there = parted
            raise DesyncError(f"{own} came to {here} while {theirs} came to {there}; {SAME_ORDER}")
        if other in gone and self._counts[other][0] < number:
            raise DesyncError(
                f"{theirs} ended while {own} waited for it at {label}; what ended it stands in that"
                " rank's own output"
            )
        if time.monotonic() > deadline:
            last = self._counts[other][0]
            place = f"last at {self._label(other, last)}" if last else "at none yet"
            raise DesyncError(
                f"{own} waited {self.timeout:.0f} s at {label} for {theirs}, which was {place}; the"
                f" processes ran different layers, or {theirs} hangs"
            )

    def _name(self, other: int) -> str:
        """A process as people know it: by its rank in the job."""
        return f"rank {self.ranks[other]}"

    def _label(self, other: int, number: int) -> str:
        label = self._slots[other][number % SLOTS][:LABEL_BYTES]
        return bytes(label).decode(errors="replace").strip()


def close_all(fds: list[int]) -> None:
    """Close these descriptors, and forget them."""
    for fd in fds:
        os.close(fd)
    fds.clear()


def _timeout_seconds(group: Group) -> float:
    assert group.process_group is not None  # as it is of several processes
    options = group.process_group._get_backend(torch.device("cpu")).options  # noqa: SLF001
    return options._timeout.total_seconds()  # noqa: SLF001
