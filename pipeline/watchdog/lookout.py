"""When a process looks at the others, and which one does.

Where processes stand still for long, one of them has the turn to look at all: so a look asks the
store for as many things as there are processes, and not for their square. Whose turn it is stands
in the store; who has it counts there, and where the count stands still another takes over. A look
that finds somebody who came to more than this process hands the turn on to that one, which knows
what the others lack. Clocks of different processes are never compared.
"""

import json
import time
from collections.abc import Callable

from pipeline.parallel.mesh import Mesh, current_mesh
from pipeline.position import HERE, Position
from pipeline.watchdog.attribution import Attribution
from pipeline.watchdog.heartbeats import Failure, Sighting

TICK_SECONDS = 1.0

HEARTBEATS_A_SECOND = 1000
"""Of all processes together, and as many turns: larger jobs beat less often."""

STANDS = 3
"""Paces after which a process counts as one that stands still."""

SILENCE_SECONDS = 60.0
"""After which a process of another machine counts as gone, where one waits for it."""


NOBODY_WANTED = ",[],"
"""In the turn, as most have to read no more of it."""


class Lookout:
    """What one process posts of itself, and what it finds of the others in its turn.

    `beat` and `look` are called from a thread each: a look that takes long delays no heartbeat.
    """

    def __init__(
        self,
        attribution: Attribution,
        *,
        timeout_seconds: float,
        position: Position = HERE,
        mesh: Callable[[], Mesh] = current_mesh,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.attribution, self.heartbeats = attribution, attribution.heartbeats
        self.timeout = timeout_seconds
        self.tick = min(TICK_SECONDS, timeout_seconds / 4)
        """Seconds between two looks for a failure that somebody has posted."""
        self.pace = max(self.tick, self.heartbeats.world_size / HEARTBEATS_A_SECOND)
        """Seconds between two heartbeats, and between two looks at the others."""
        self._position, self._mesh, self._clock = position, mesh, clock
        self._beat = 0
        self._place = ((0, 0), clock())
        """Numbers of the collective and transfer that the process is at, and since when."""
        self._next_look = -float("inf")
        self._turn, self._turn_since = "", clock()
        """As it was found last, and since when it is that."""
        self._holder: int | None = None
        self._published = 0
        """The collective up to which the history is in the store."""
        self._suspected: list[int] = []

    def seconds_here(self) -> float:
        """Seconds for which the process has been where it is."""
        return self._clock() - self._place[1]

    def beat(self, *, left: bool = False) -> None:
        """Say where this process is."""
        now, here = self._clock(), self._position
        last = here.last
        if (last.number, here.transfers) != self._place[0]:
            self._place = ((last.number, here.transfers), now)
        self._beat += 1
        in_stages = self._mesh().stages.size > 1
        self.heartbeats.appear(
            Sighting(
                number=last.number,
                fingerprint=last.fingerprint,
                label=here.waits_at or str(last),
                seconds=now - self._place[1],
                beat=self._beat,
                left=left,
                waits_for=here.waits_for if in_stages else (),
            )
        )

    def look(self) -> Failure | None:
        """Where this process has stood still for long, and has the turn: who keeps it?"""
        now = self._clock()
        (number, transfers), since = self._place
        if number + transfers == 0 or now < self._next_look:
            return None
        self._next_look = now + self.pace
        stands = now - since
        if stands < min(STANDS * self.pace, self.timeout):
            self.attribution.forget()
            return None
        has_turn = self._has_turn(now)
        if has_turn is False:
            self.attribution.forget()
        return self._look_at_all(now, stands) if has_turn else None

    def _look_at_all(self, now: float, stands: float) -> Failure | None:
        attribution = self.attribution
        alike = attribution.alike()
        seen = self.heartbeats.sightings([*alike, *attribution.elsewise()])
        of_alike = {rank: seen[rank] for rank in alike if rank in seen}
        strange = attribution.out_of_step(of_alike)
        new = any(rank not in self._suspected for rank in strange)
        self._suspected = strange  # who is asked for a history with the next turn
        found = attribution.elsewhere(strange) if strange else None
        if len(of_alike) < len(alike):  # who is missing in what the store tells may be the one
            self._next_look = now + self.tick
        elif found is None and not new:
            found = attribution.late(of_alike, stands, self.timeout)
        if found is None:
            found = attribution.silent(seen, now, SILENCE_SECONDS)
        furthest = attribution.furthest(of_alike)
        if found is None and furthest != self.heartbeats.rank:
            self._give_turn(furthest, now)
        return found

    # The turn, as JSON: [rank, count, ranks whose histories are wanted,
    # by rank the last heartbeat of those that are silent and the seconds since]

    def _has_turn(self, now: float) -> bool | None:
        """Whether it is this process's turn, by one request; None where the store doesn't tell."""
        own = self.heartbeats.rank
        stale = now - self._turn_since >= STANDS * self.pace
        takes = stale or self._holder in (None, own)
        desired = self._next_turn(own, now) if takes else self._turn
        found = self.heartbeats.swap_turn(self._key, self._turn, desired)
        if found is None:
            return None
        since = self._turn_since  # of what was there before
        if found != self._turn:
            self._turn, self._turn_since = found, self._clock()
        holder = int(found[1 : found.index(",")])
        if NOBODY_WANTED not in found and own in json.loads(found)[2]:
            self._publish_history()
        if holder == own != self._holder:  # who had it before has listened for longer
            silent = json.loads(found)[3]
            self.attribution.listen_since(
                {int(rank): (beat, since - seconds) for rank, (beat, seconds) in silent.items()}
            )
        self._holder = holder
        return holder == own

    def _publish_history(self) -> None:
        if self._published != self._position.number:
            self._published = self._position.number
            self.heartbeats.publish_history(self._position.history())

    def _give_turn(self, rank: int, now: float) -> None:
        desired = self._next_turn(rank, now)
        if self.heartbeats.swap_turn(self._key, self._turn, desired) == desired:
            self._turn, self._turn_since, self._holder = desired, now, rank

    def _next_turn(self, holder: int, now: float) -> str:
        count, silent = 0, {}
        if self._turn:
            _, count, _, silent = json.loads(self._turn)
        if self._holder == self.heartbeats.rank:
            silent = self.attribution.silences(now, least=STANDS * self.pace)
        value = [holder, count + 1, self._suspected, silent]
        return json.dumps(value, separators=(",", ":"))

    @property
    def _key(self) -> str:
        """A key of the processes that do the same."""
        return str(self._mesh().in_step[0])
