"""What the processes of a job leave for each other in its store: positions, and what went wrong.

The store is that of the rendezvous. torchrun's agent holds it, so that it outlives the processes;
where rank 0 holds it, it ends with rank 0, and every function here then finds nothing.
"""

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store  # it has no public name

from pipeline.parallel.group import Group
from pipeline.position import Collective

T = TypeVar("T")

PATIENCE = timedelta(seconds=5)
"""How long the store itself may take, which answers in microseconds."""

LAST = 16
"""Collectives that a process tells of at once."""

AT_ONCE = 256
"""Keys of one request: those of other threads come in between."""


@dataclass(frozen=True)
class Failure:
    """Why a job ends."""

    rank: int
    """Whose fault it is."""

    what: str
    """A clause whose subject is that rank: `rank 1 failed: ValueError: ...`."""

    code: int
    """The exit code of every process."""

    stacks: bool = False
    """Whether every process shows the stacks of its threads."""


class Sighting(NamedTuple):
    """Where a process was at its last heartbeat."""

    number: int
    """Number of the collective that it came to last."""

    fingerprint: int
    """Fingerprint of all collectives up to that one."""

    label: str
    seconds: float
    """Seconds for which it has been there."""

    beat: int
    """The number of its heartbeats."""

    left: bool = False
    """It went its way, as it should."""

    waits_for: tuple[int, ...] = ()
    """Ranks that it waits for, of a stage of a pipeline."""

    def encoded(self) -> str:
        """The sighting as the store has it."""
        values = (self.number, self.fingerprint, self.label, round(self.seconds, 3), self.beat)
        return json.dumps([*values, self.left, _runs(self.waits_for)], separators=(",", ":"))

    @classmethod
    def decoded(cls, found: bytes) -> "Sighting":
        """The inverse of `encoded`."""
        number, fingerprint, label, seconds, beat, left, runs = json.loads(found)
        waits_for = tuple(rank for run in runs for rank in range(*run))
        return cls(number, fingerprint, label, seconds, beat, left, waits_for)


class Heartbeats:
    """The notices of one job, in a part of a store that is its own."""

    def __init__(self, store: Store, job: str, *, rank: int, world_size: int) -> None:
        self.job = job
        self._gone = False
        self._store = store
        # A file that processes meet in reads one key at a time.
        self._reads_many = store.has_extended_api()  # pyright: ignore[reportAttributeAccessIssue]
        self._last: deque[str] = deque(maxlen=LAST)
        self.rank, self.world_size = rank, world_size

    @classmethod
    def of_job(cls, job: str, world: Group) -> "Heartbeats":
        """The heartbeats in the store where the job's processes met, by a connection of its own.

        `job` tells it from others that used the same store before.
        """
        store = _get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue]
        store.set_timeout(PATIENCE)
        part = PrefixStore(f"watch/{job}", store)
        return cls(part, job, rank=world.rank, world_size=world.size)

    def claim(self) -> bool:
        """Whether this process is the first to have something to say; the others then wait."""
        mine = str(self.rank).encode()
        first = self._try(lambda: self._store.compare_set("claim", "", mine.decode()))
        return first in (None, mine)

    def post(self, failure: Failure) -> None:
        """Tell the others why the job ends."""
        self._try(lambda: self._store.set("failure", json.dumps(asdict(failure))))

    def failure(self) -> Failure | None:
        """Why the job ends, if it does."""
        found = self._get("failure")
        return None if found is None else Failure(**json.loads(found))

    def acknowledge(self) -> None:
        """Say that this process has heard of the failure."""
        self._try(lambda: self._store.add("heard", 1))

    def acknowledged(self) -> int:
        """How many have heard of it; all where nobody can say any more."""
        heard = self._try(lambda: self._store.add("heard", 0))
        return self.world_size if heard is None else heard

    def appear(self, sighting: Sighting) -> None:
        """Say where this process is."""
        self._try(lambda: self._store.set(f"at/{self.rank}", sighting.encoded()))

    def sightings(self, ranks: Sequence[int]) -> dict[int, Sighting]:
        """Where these processes are, as far as the store tells; each has appeared before."""
        found = zip(ranks, self._values([f"at/{rank}" for rank in ranks]), strict=True)
        return {rank: Sighting.decoded(value) for rank, value in found if value is not None}

    def swap_turn(self, key: str, expected: str, desired: str) -> str | None:
        """Set whose turn it is to look to `desired`, if it was `expected`; return whose it is."""
        found = self._try(lambda: self._store.compare_set(f"turn/{key}", expected, desired))
        return None if found is None else found.decode()

    def begin(self) -> None:
        """Say that this process has come to nothing yet: the store waits for what isn't there."""
        self.appear(Sighting(0, 0, "none yet", 0.0, 0))
        self.publish_history([])
        self._try(lambda: self._store.set(f"last/{self.rank}", "[]"))

    def publish_history(self, history: Sequence[Collective]) -> None:
        """Say at which collectives this process has been."""
        rows = json.dumps([[each.number, str(each)] for each in history], separators=(",", ":"))
        self._try(lambda: self._store.set(f"history/{self.rank}", rows))

    def publish_last(self, collective: Collective) -> None:
        """Say to which collective this process comes now: a few microseconds, nobody answers."""
        self._last.append(json.dumps([collective.number, str(collective)]))
        rows = ",".join(self._last)
        self._try(lambda: self._store.set(f"last/{self.rank}", f"[{rows}]"))

    def histories(self, ranks: Sequence[int]) -> dict[int, dict[int, str]]:
        """Collectives that these processes have announced, by number."""
        keys = [f"{kind}/{rank}" for rank in ranks for kind in ("history", "last")]
        rows = [json.loads(value or "[]") for value in self._values(keys)]
        pairs = zip(ranks, rows[::2], rows[1::2], strict=True)
        return {rank: dict([*history, *last]) for rank, history, last in pairs}

    def _values(self, keys: list[str]) -> list[bytes | None]:
        """What the store has under keys that are there."""
        found: list[bytes | None] = []
        for start in range(0, len(keys), AT_ONCE):
            some = keys[start : start + AT_ONCE]
            if self._reads_many:
                values = self._try(lambda some=some: self._store.multi_get(some))
                found += values or [None] * len(some)
            else:
                found += [self._get(key) for key in some]
        return found

    def _get(self, key: str) -> bytes | None:
        return self._try(lambda: self._store.get(key) if self._store.check([key]) else None)

    def _try(self, query: Callable[[], T]) -> T | None:
        if self._gone:
            return None
        try:
            return query()
        except dist.DistNetworkError:  # torch shows a page for every further attempt
            self._gone = True
        except (RuntimeError, ValueError):  # it may answer the next time
            pass
        return None


def _runs(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Numbers as (start, stop, step): of the others in a group of processes there are two."""
    runs: list[tuple[int, int, int]] = []
    at = 0
    while at < len(ranks):
        step = max(1, ranks[at + 1] - ranks[at]) if at + 1 < len(ranks) else 1
        length = 1
        while at + length < len(ranks) and ranks[at + length] == ranks[at] + length * step:
            length += 1
        runs.append((ranks[at], ranks[at] + length * step, step))
        at += length
    return runs
