"""Which process of a job is to blame, as far as another one can tell."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice

import psutil

from pipeline.parallel.mesh import Mesh, current_mesh
from pipeline.position import HERE, SAME_ORDER, Position
from pipeline.watchdog.heartbeats import Failure, Heartbeats, Sighting

FEW = 8
"""Processes that are compared collective by collective at a time."""


@dataclass(frozen=True)
class Identity:
    """A process, unique among all of this and other machines."""

    host: str
    pid: int
    started: float


class Attribution:
    """The other processes of the job, of which all are `known`, by rank."""

    def __init__(
        self,
        heartbeats: Heartbeats,
        known: Sequence[Identity],
        *,
        position: Position = HERE,
        mesh: Callable[[], Mesh] = current_mesh,
    ) -> None:
        self.heartbeats, self.known = heartbeats, known
        self.rank = heartbeats.rank
        self._position, self._mesh = position, mesh
        host = known[self.rank].host
        self._here = {
            other: process
            for other, each in enumerate(known)
            if other != self.rank and each.host == host and (process := _local(each)) is not None
        }
        self._silent: dict[int, tuple[int, float]] = {}
        """The last heartbeat of each, and since when it is that."""

    def others(self) -> list[int]:
        """The other ranks."""
        return [other for other in range(len(self.known)) if other != self.rank]

    def alike(self) -> tuple[int, ...]:
        """The others that do the same as this process; another stage does something else."""
        return tuple(rank for rank in self._mesh().in_step if rank != self.rank)

    def elsewise(self) -> tuple[int, ...]:
        """Processes of other stages that this one waits for."""
        stages = self._mesh().stages
        return self._position.waits_for if stages.size > 1 else ()

    def living(self) -> int:
        """How many of the others live, or may live on other machines."""
        return len(self.known) - 1 - sum(not _lives(process) for process in self._here.values())

    def unreaped(self) -> bool:
        """Whether a process has ended that whoever started it hasn't noticed yet."""
        return any(_is_zombie(process) for process in self._here.values())

    def ended(self) -> Failure | None:
        """A process of this machine that is gone and has reported nothing.

        What a process has to say it says before it goes, so that the order of the looks counts.
        """
        for other, process in self._here.items():
            if _lives(process) or self.heartbeats.failure() is not None:
                continue
            seen = self.heartbeats.sightings([other]).get(other)
            if seen is None or not seen.left:
                return self._without_a_word(other)
        return None

    def left(self, seen: Mapping[int, Sighting]) -> Failure | None:
        """A process that went its way while this one needed it."""
        for other, each in seen.items():
            if each.left:
                what = (
                    f"rank {other} left while rank {self.rank} waited for it at"
                    f" {self._position.last}"
                )
                return Failure(other, what, 1)
        return None

    def out_of_step(self, seen: Mapping[int, Sighting]) -> list[int]:
        """The ranks in `seen` that have come to other collectives than this process, a few."""
        own = {each.number: each.fingerprint for each in self._position.history()}
        strange = (
            other
            for other, each in seen.items()
            if own.get(each.number, each.fingerprint) != each.fingerprint
        )
        return list(islice(strange, FEW))

    def elsewhere(self, among: Sequence[int]) -> Failure | None:
        """One of these processes that came to another collective than this one did.

        Their histories are as they have published them.
        """
        own = {each.number: str(each) for each in self._position.history()}
        for other, theirs in self.heartbeats.histories(among).items():
            for number in sorted(own.keys() & theirs.keys()):
                if own[number] != theirs[number]:
                    what = (
                        f"rank {self.rank} came to {own[number]} while rank {other} came to"
                        f" {theirs[number]} (collective {number}); {SAME_ORDER}"
                    )
                    return Failure(other, what, 1, stacks=True)
        return None

    def furthest(self, seen: Mapping[int, Sighting]) -> int:
        """The rank, of this process and `seen`, that came to most and so knows what others lack."""
        own = (self._position.number, bool(self._position.waits_for), -self.rank)
        places = [(each.number, bool(each.waits_for), -other) for other, each in seen.items()]
        furthest = max(places, default=own)
        return self.rank if furthest[:2] <= own[:2] else -furthest[2]

    def late(self, seen: Mapping[int, Sighting], waited: float, patience: float) -> Failure | None:
        """The process that is furthest behind, where one waits for it for longer than `patience`.

        `waited` is for how long this process has. Between the stages of a pipeline, which do
        different things, it is the one that others wait for, and that waits for nobody.
        """
        if self._mesh().stages.size > 1:
            return self._at_the_end(waited) if waited >= patience else None
        behind = [(each.number, other) for other, each in seen.items() if not each.left]
        number, other = min(behind, default=(self._position.number, -1))
        if number >= self._position.number:
            return None
        waits = [(each.seconds, -rank) for rank, each in seen.items() if each.number > number]
        seconds, rank = max([(waited, -self.rank), *waits])
        if seconds < patience:
            return None
        history = self._position.history()
        missed = next((each for each in history if each.number > number), self._position.last)
        what = (
            f"rank {other} did not come to {missed} (collective {missed.number}), where rank"
            f" {-rank} waited {seconds:.0f} s for it: {_whereabouts(seen[other])}"
        )
        return Failure(other, what, 1, stacks=True)

    def _at_the_end(self, seconds: float) -> Failure | None:
        """Who is at the end of the chain of those that wait for each other."""
        ahead = list(self._position.waits_for)
        came_from: dict[int, int] = dict.fromkeys(ahead, self.rank)
        while ahead:
            seen = self.heartbeats.sightings(ahead)
            for each in ahead:
                if each not in seen or not seen[each].waits_for:
                    return self._blamed(each, seen.get(each), came_from, seconds)
            new = {rank: each for each in ahead for rank in seen[each].waits_for}
            ahead = [rank for rank in new if rank not in came_from and rank != self.rank]
            came_from.update((rank, new[rank]) for rank in ahead)
        return None

    def _blamed(
        self, rank: int, seen: Sighting | None, came_from: dict[int, int], seconds: float
    ) -> Failure:
        between: list[int] = []
        before = came_from[rank]
        while before != self.rank:
            between.append(before)
            before = came_from[before]
        through = "".join(f" through rank {each}" for each in reversed(between))
        place = "it has said nothing" if seen is None else _whereabouts(seen)
        what = (
            f"rank {rank} hangs: rank {self.rank} waited {seconds:.0f} s for it{through} at"
            f" {self._position.waits_at or self._position.last}: {place}"
        )
        return Failure(rank, what, 1, stacks=True)

    def silent(self, seen: Mapping[int, Sighting], now: float, patience: float) -> Failure | None:
        """A process of another machine that is behind and has reported nothing for `patience`."""
        for other, each in seen.items():
            beat, since = self._silent.get(other, (each.beat, now))
            since = since if beat == each.beat else now
            self._silent[other] = each.beat, since
            if other not in self._here and now - since >= patience and not each.left:
                what = (
                    f"rank {other} on {self.known[other].host} has not been heard of for"
                    f" {now - since:.0f} s (killed? network gone?) while rank {self.rank} waited"
                    f" for it at {self._position.last}: {_whereabouts(each)}"
                )
                return Failure(other, what, 1)
        return None

    def silences(self, now: float, *, least: float) -> dict[int, tuple[int, float]]:
        """Last heartbeat and seconds since, by rank, of those that were silent longest: a few."""
        found = ((now - since, other, beat) for other, (beat, since) in self._silent.items())
        longest = nlargest(2 * FEW, (each for each in found if each[0] >= least))
        return {other: (beat, round(seconds, 3)) for seconds, other, beat in longest}

    def listen_since(self, silences: Mapping[int, tuple[int, float]]) -> None:
        """Take over what another process has found: the last heartbeats, and when they were."""
        self._silent = dict(silences)

    def forget(self) -> None:
        """Begin again to listen for those that fall silent."""
        self._silent.clear()

    def _without_a_word(self, other: int) -> Failure:
        """Where sizes don't match gloo ends a process on the spot: then that is what happened."""
        mismatch = self.elsewhere([other]) if other in self._mesh().in_step else None
        if mismatch is not None:
            return Failure(other, f"{mismatch.what}; this ended rank {other}", 1)
        here = self._position
        waited = f" while rank {self.rank} waited for it at {here.last}" if here.number else ""
        return Failure(
            other, f"rank {other} ended without a word (killed? out of memory?){waited}", 1
        )


def _whereabouts(seen: Sighting) -> str:
    if seen.number == 0:
        return "it has come to no collective yet"
    return f"its last was {seen.label} (collective {seen.number}), {seen.seconds:.0f} s ago"


def _local(identity: Identity) -> psutil.Process | None:
    """The process, where it runs on this machine and can be seen from here."""
    try:
        process = psutil.Process(identity.pid)
        same = process.create_time() == identity.started
    except psutil.Error:
        return None
    return process if same else None


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and not _is_zombie(process)
    except psutil.Error:
        return False


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
