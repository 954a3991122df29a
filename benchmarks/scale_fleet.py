"""A healthy job of thousands of processes, as `scale_watch.Job` has it, many processes at a time.

What `Job` does call by call is done here for all processes at once where the calls decide nothing:
heartbeats, looks for a failure, and looks of a process that hasn't the turn. Their effects stand in
arrays. A look that may decide something - the process has the turn, is given it, or takes it over -
is the lookout's own, with what it knows brought up to date. Delays are drawn by process, thread and
number, so that both simulations draw the same: they take the same turns at the same moments, which
a test compares.
"""

import copy
import random
from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch._C._distributed_c10d import Store as TorchStore

from benchmarks.scale_watch import (
    BEATS,
    COLLECTIVE,
    LONGEST_DELAY,
    LOOKS,
    MIX,
    NO_PROCESS,
    NODE,
    Connection,
    Store,
)
from pipeline.parallel.group import Group
from pipeline.parallel.mesh import Mesh
from pipeline.position import Position
from pipeline.watchdog.attribution import Attribution, Identity
from pipeline.watchdog.heartbeats import AT_ONCE, PATIENCE, Failure, Heartbeats, Sighting
from pipeline.watchdog.lookout import NOBODY_WANTED, STANDS, Lookout

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NOBODY = -1
TURN = "turn/0"


class Fleet:
    """Processes that watch each other, eight on a machine, and the time that has passed."""

    def __init__(self, size: int, *, timeout_seconds: float, slow: float, seed: int = 0) -> None:
        self.now = 0.0
        self.found: Failure | None = None
        self.choose = random.Random(seed)
        self.store = Store()
        self._seed, self._slow, self._ranks = seed, slow, np.arange(size)
        self._patience = PATIENCE.total_seconds()
        self._position = Position()
        """Of all that have come to the latest collective."""
        self._fingerprints = [0]
        self.beats = _Beats(size)
        self._make_lookouts(timeout_seconds)
        self._pace = self._lookouts[0].pace
        self._least = min(STANDS * self._pace, timeout_seconds)
        starts = np.array([self.choose.uniform(0, self._pace) for _ in range(2 * size)])
        self.beats.next[:] = starts[::2]
        self._answers = np.zeros(size, np.int64)
        self._next_look = starts[1::2].copy()
        self._look_for_failures(self._ranks)
        # Of the turn, as each process has found it last.
        self._values = [""]
        self._version = np.zeros(size, np.int64)
        self._turn_since = np.zeros(size)
        self._holder = np.full(size, NOBODY)
        self._heard = np.zeros(size, np.bool_)
        """That another has the turn, so that it listens for nobody."""
        self._holder_now, self._is_wanted = NOBODY, False

    def _make_lookouts(self, timeout_seconds: float) -> None:
        ranks = tuple(range(len(self._ranks)))
        known = [Identity(f"machine-{rank // NODE}", NO_PROCESS + rank, 0.0) for rank in ranks]
        self._connections: list[Connection] = []
        self._lookouts: list[Lookout] = []
        for rank in ranks:
            world = Group(rank, ranks)
            mesh = Mesh(world=world, data=world)
            connection = Connection(self.store, rank, self._seed)
            connection.thread, connection.slow = LOOKS, self._slow
            attribution = Attribution(
                _Heartbeats(self, connection, rank),
                known,
                position=self._position,
                mesh=lambda mesh=mesh: mesh,
            )
            lookout = Lookout(
                attribution,
                timeout_seconds=timeout_seconds,
                position=self._position,
                mesh=lambda mesh=mesh: mesh,
                clock=lambda connection=connection: self.now + connection.delay,
            )
            self._connections.append(connection)
            self._lookouts.append(lookout)

    def enter_collective(self, *, but: Sequence[int] = ()) -> None:
        """All come to one, but for these."""
        for rank in but:
            late = copy.copy(self._position)
            late.recent = self._position.recent.copy()
            self._put(rank, late)
        self._position.enter_collective(*COLLECTIVE)
        self._fingerprints.append(self._position.fingerprint)
        self.beats.position[:] = self._position.number
        self.beats.position[list(but)] -= 1

    def come_late(self, rank: int) -> None:
        """A process comes to the collective that the others are at."""
        self._put(rank, self._position)
        self.beats.position[rank] = self._position.number

    def _put(self, rank: int, position: Position) -> None:
        lookout = self._lookouts[rank]
        lookout._position = lookout.attribution._position = position  # noqa: SLF001

    def run(self, until: float) -> None:
        """Let time pass, until a process has found somebody at fault."""
        while self.found is None:
            times = self._next_look
            number, since = self.beats.places_at(times)
            stands = (number > 0) & (times - since >= self._least)
            # Who would take the turn changes nothing where another has changed it before.
            takes = (
                (times - self._turn_since >= STANDS * self._pace)
                | (self._holder == self._ranks)
                | (self._holder == NOBODY)
            )
            decides = stands & (
                (takes & (self._version == len(self._values) - 1))
                | (self._holder_now == self._ranks)
                | self._is_wanted
            )
            first = int(np.argmin(np.where(decides, times, np.inf)))
            at = times[first] if decides[first] else np.inf
            # Looks of a pace are safe together: what comes after one of them is later than all.
            due = np.flatnonzero((times < min(at, times.min() + self._pace)) & (times <= until))
            if len(due):
                self._look_without_turn(due, stands[due])
            elif at <= until:
                self._look(first)
            else:
                break
        self.now = until if self.found is None else self.now
        self._beat(self.now)

    def _look_without_turn(self, ranks: Ints, stands: NDArray[np.bool_]) -> None:
        """What `Lookout.look` does where the process hasn't the turn, and won't take it."""
        times = self._next_look[ranks]
        delays = np.zeros(len(ranks))
        querying = ranks[stands]
        delays[stands] = self._delays(querying)
        answered = querying[delays[stands] <= self._patience]
        news = answered[self._version[answered] != len(self._values) - 1]
        delays = np.minimum(delays, self._patience)
        since = self._turn_since.copy()
        since[ranks] = times + delays
        self._turn_since[news] = since[news]
        self._version[news] = len(self._values) - 1
        self._holder[answered] = self._holder_now
        self._heard[answered] = True
        self._heard[ranks[~stands]] = True
        self._next_look[ranks] = times + (self._pace + delays)
        self._look_for_failures(ranks)

    def _look(self, rank: int) -> None:
        """A look that may decide something, by the process's own lookout."""
        self.now = float(self._next_look[rank])
        self._beat(self.now)
        lookout, connection = self._lookouts[rank], self._connections[rank]
        if self._heard[rank]:
            lookout.attribution.forget()
        self._heard[rank] = False
        holder = int(self._holder[rank])
        lookout._place = (int(self.beats.number[rank]), 0), float(self.beats.since[rank])  # noqa: SLF001
        lookout._turn = self._values[self._version[rank]]  # noqa: SLF001
        lookout._turn_since = float(self._turn_since[rank])  # noqa: SLF001
        lookout._holder = None if holder == NOBODY else holder  # noqa: SLF001
        connection.delay, connection.answers[LOOKS] = 0.0, int(self._answers[rank])
        found = lookout.look()
        if found is not None and lookout.heartbeats.claim():
            self.found = found
        value = self.store.values.get(TURN, b"").decode()
        if value != self._values[-1]:
            self._values.append(value)
            self._holder_now = int(value[1 : value.index(",")])
            self._is_wanted = NOBODY_WANTED not in value
        if lookout._turn == value:  # noqa: SLF001
            self._version[rank] = len(self._values) - 1
        self._turn_since[rank] = lookout._turn_since  # noqa: SLF001
        self._holder[rank] = NOBODY if lookout._holder is None else lookout._holder  # noqa: SLF001
        self._answers[rank] = connection.answers[LOOKS]
        self._next_look[rank] = self.now + (self._pace + connection.delay)
        self._look_for_failures(self._ranks[rank : rank + 1])

    def _look_for_failures(self, ranks: Ints) -> None:
        """Which come before the looks, and delay these where the answer is slow."""
        self._next_look[ranks] += np.minimum(self._delays(ranks), self._patience)

    def _delays(self, ranks: Ints) -> Floats:
        """Of the next answers to these threads that look."""
        numbers = self._answers[ranks]
        self._answers[ranks] += 1
        self.store.requests += len(ranks)
        return delays_of(self._seed, self._slow, ranks, LOOKS, numbers)

    def _beat(self, until: float) -> None:
        """All heartbeats up to then."""
        beats = self.beats
        while len(due := np.flatnonzero(beats.next <= until)):
            delays = delays_of(self._seed, self._slow, due, BEATS, beats.count[due])
            self.store.requests += len(due)
            beats.send(due, stored=delays <= self._patience)
            beats.next[due] += self._pace + np.minimum(delays, self._patience)

    def sightings(self, ranks: Sequence[int]) -> dict[int, Sighting]:
        """Where these processes were at the last heartbeats that the store has."""
        beats, chosen = self.beats, np.array(ranks)
        numbers = beats.stored_number[chosen]
        fingerprints = np.array(self._fingerprints, dtype=np.uint64)[numbers]
        label = str(self._position.last)
        columns = zip(
            numbers.tolist(),
            fingerprints.tolist(),
            [label] * len(chosen),
            beats.stored_seconds[chosen].tolist(),
            beats.stored_count[chosen].tolist(),
            strict=True,
        )
        return dict(zip(ranks, (Sighting(*each) for each in columns), strict=True))


class _Beats:
    """The heartbeats of all processes: when the next comes, and what the store has of each."""

    def __init__(self, size: int) -> None:
        self.next = np.zeros(size)
        self.count = np.zeros(size, np.int64)
        self.position = np.zeros(size, np.int64)
        """Collective that each is at."""
        self.number, self.since = np.zeros(size, np.int64), np.zeros(size)
        """The same as of its last heartbeat, and since when."""
        self.stored_number = np.zeros(size, np.int64)
        self.stored_count = np.zeros(size, np.int64)
        self.stored_seconds = np.zeros(size)

    def places_at(self, times: Floats) -> tuple[Ints, Floats]:
        """Collective and since when, as each process knows by its heartbeats up to a time."""
        moves = (self.number != self.position) & (self.next <= times)
        return np.where(moves, self.position, self.number), np.where(moves, self.next, self.since)

    def send(self, ranks: Ints, *, stored: NDArray[np.bool_]) -> None:
        """The next heartbeat of each of these, which the store gets or not."""
        times, number = self.next[ranks], self.position[ranks]
        self.since[ranks] = np.where(self.number[ranks] != number, times, self.since[ranks])
        self.number[ranks] = number
        self.count[ranks] += 1
        kept = ranks[stored]
        self.stored_number[kept] = number[stored]
        self.stored_count[kept] = self.count[kept]
        self.stored_seconds[kept] = np.round(times[stored] - self.since[kept], 3)


class _Heartbeats(Heartbeats):
    """Those of one process, which finds the others' in the arrays."""

    def __init__(self, fleet: Fleet, connection: Connection, rank: int) -> None:
        size = len(fleet._ranks)  # noqa: SLF001  # of this module
        super().__init__(cast("TorchStore", connection), "job", rank=rank, world_size=size)
        self._fleet, self._connection = fleet, connection

    def sightings(self, ranks: Sequence[int]) -> dict[int, Sighting]:
        """As the class has it, without the text that a heartbeat is on its way."""
        found: dict[int, Sighting] = {}
        for start in range(0, len(ranks), AT_ONCE):
            some = ranks[start : start + AT_ONCE]
            found |= self._try(lambda some=some: self._requested(some)) or {}
        return found

    def _requested(self, ranks: Sequence[int]) -> dict[int, Sighting]:
        self._connection.count_keys(keys=len(ranks))
        return self._fleet.sightings(ranks)


def delays_of(seed: int, slow: float, ranks: Ints, thread: int, numbers: Ints) -> Floats:
    """`scale_watch.delay_of` for the answers of that number to these processes."""
    first, second = np.uint64(MIX[0]), np.uint64(MIX[1])
    place = np.uint64((seed * 2 + thread) << 40) + (ranks.astype(np.uint64) << np.uint64(24))
    words = _mixed(place * first + numbers.astype(np.uint64) * second)
    shares = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    seconds = np.zeros(len(ranks))
    late = np.flatnonzero(shares < slow)
    if len(late):
        again = _mixed(words[late] + first) >> np.uint64(11)
        seconds[late] = again.astype(np.float64) * 2.0**-53 * LONGEST_DELAY
    return seconds


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(MIX[1])
    words = (words ^ (words >> np.uint64(27))) * np.uint64(MIX[2])
    return words ^ (words >> np.uint64(31))
