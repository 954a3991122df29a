"""Which process of a job is to blame, as far as another one can tell."""

from dataclasses import dataclass

import psutil

from pipeline.parallel.group import Group
from pipeline.parallel.mesh import current_mesh
from pipeline.position import HERE, SAME_ORDER
from pipeline.watchdog.heartbeats import Failure, Heartbeats, Sighting


@dataclass(frozen=True)
class Identity:
    """A process, unique among all of this and other machines."""

    host: str
    pid: int
    started: float


class Attribution:
    """The other processes of the job. All processes construct it together."""

    def __init__(self, heartbeats: Heartbeats, own: Identity, world: Group) -> None:
        self.heartbeats = heartbeats
        self.known = world.gather_objects(own)
        self.rank = world.rank
        self._here = {
            other: process
            for other, each in enumerate(self.known)
            if other != self.rank and (process := _local(each, own.host)) is not None
        }
        self._silent: dict[int, tuple[int, float]] = {}

    def others(self) -> list[int]:
        """The other ranks."""
        return [other for other in range(len(self.known)) if other != self.rank]

    def living(self) -> int:
        """How many of the others live, or may live on other machines."""
        return sum(other not in self._here or _lives(self._here[other]) for other in self.others())

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
            seen = self.heartbeats.sighting(other)
            if seen is None or not seen.left:
                return self._without_a_word(other)
        return None

    def left(self) -> Failure | None:
        """A process that went its way while this one needed it."""
        for other in self.others():
            seen = self.heartbeats.sighting(other)
            if seen is not None and seen.left:
                what = f"rank {other} left while rank {self.rank} waited for it at {HERE.last}"
                return Failure(other, what, 1)
        return None

    def elsewhere(self) -> Failure | None:
        """A process that came to another collective than this one did."""
        own = {each.number: str(each) for each in HERE.history()}
        for other in self.others():
            if other not in current_mesh().data.ranks:  # another stage does something else
                continue
            theirs = self.heartbeats.history(other)
            for number in sorted(own.keys() & theirs.keys()):
                if own[number] != theirs[number]:
                    what = (
                        f"rank {self.rank} came to {own[number]} while rank {other} came to"
                        f" {theirs[number]} (collective {number}); {SAME_ORDER}"
                    )
                    return Failure(other, what, 1, stacks=True)
        return None

    def late(self, seconds: float) -> Failure | None:
        """The process that is furthest behind this one, which has waited for so long.

        Between the stages of a pipeline, which do different things, it is the one that others wait
        for, and that waits for nobody.
        """
        if current_mesh().stages.size > 1:
            return self._at_the_end(seconds)
        behind = [(seen.number, other, seen) for other, seen in self._seen() if not seen.left]
        number, other, seen = min(behind, default=(HERE.number, -1, None))
        if seen is None or number >= HERE.number:
            return None
        missed = next((each for each in HERE.history() if each.number > number), HERE.last)
        what = (
            f"rank {other} did not come to {missed} (collective {missed.number}), where rank"
            f" {self.rank} waited {seconds:.0f} s for it: {_whereabouts(seen)}"
        )
        return Failure(other, what, 1, stacks=True)

    def _at_the_end(self, seconds: float) -> Failure | None:
        """Who is at the end of the chain of those that wait for each other."""
        seen = dict(self._seen())
        ahead = list(HERE.waits_for)
        came_from: dict[int, int] = dict.fromkeys(ahead, self.rank)
        while ahead:
            each = ahead.pop()
            found = seen.get(each)
            if found is None or not found.waits_for:
                return self._blamed(each, found, came_from, seconds)
            new = [rank for rank in found.waits_for if rank not in came_from and rank != self.rank]
            came_from.update((rank, each) for rank in new)
            ahead += new
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
            f" {HERE.waits_at or HERE.last}: {place}"
        )
        return Failure(rank, what, 1, stacks=True)

    def silent(self, now: float, patience: float) -> Failure | None:
        """A process of another machine that is behind and has reported nothing for `patience`."""
        for other, seen in self._seen():
            beat, since = self._silent.get(other, (-1, now))
            if seen.beat != beat:
                self._silent[other] = (seen.beat, now)
            elif other not in self._here and now - since >= patience and not seen.left:
                what = (
                    f"rank {other} on {seen.host} has not been heard of for {now - since:.0f} s"
                    f" (killed? network gone?) while rank {self.rank} waited for it at"
                    f" {HERE.last}: {_whereabouts(seen)}"
                )
                return Failure(other, what, 1)
        return None

    def _seen(self) -> list[tuple[int, Sighting]]:
        sightings = [(other, self.heartbeats.sighting(other)) for other in self.others()]
        return [(other, seen) for other, seen in sightings if seen is not None]

    def _without_a_word(self, other: int) -> Failure:
        """Where sizes don't match gloo ends a process on the spot: then that is what happened."""
        mismatch = self.elsewhere()
        if mismatch is not None and mismatch.rank == other:
            return Failure(other, f"{mismatch.what}; this ended rank {other}", 1)
        waited = f" while rank {self.rank} waited for it at {HERE.last}" if HERE.number else ""
        return Failure(
            other, f"rank {other} ended without a word (killed? out of memory?){waited}", 1
        )


def _whereabouts(seen: Sighting) -> str:
    if seen.number == 0:
        return "it has come to no collective yet"
    return f"its last was {seen.label} (collective {seen.number}), {seen.seconds:.0f} s ago"


def _local(identity: Identity, own_host: str) -> psutil.Process | None:
    """The process, where it runs on this machine and can be seen from here."""
    if identity.host != own_host:
        return None
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
