"""What the processes of a job leave for each other in its store: positions, and what went wrong.

The store is that of the rendezvous. torchrun's agent holds it, so that it outlives the processes;
where rank 0 holds it, it ends with rank 0, and every function here then finds nothing.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store  # it has no public name

from pipeline.parallel.group import Group
from pipeline.position import Collective

T = TypeVar("T")

PATIENCE = timedelta(seconds=5)
"""With the store itself, which answers in microseconds."""

LAST = 16
"""Collectives that a process tells of at once."""


@dataclass(frozen=True)
class Failure:
    """Why a job ends."""

    rank: int
    """Whose fault it is."""

    what: str
    """A clause whose subject is that rank: `rank 1 failed: ValueError: ...`."""

    code: int
    """With which every process exits."""

    stacks: bool = False
    """Whether every process shows the stacks of its threads."""


@dataclass(frozen=True)
class Sighting:
    """Where a process was at its last heartbeat."""

    host: str
    pid: int
    started: float
    """When the process began, by its system."""

    number: int
    label: str
    seconds: float
    """For which it has been there."""

    beat: int
    """The number of its heartbeats."""

    left: bool = False
    """It went its way, as it should."""

    waits_for: list[int] = field(default_factory=list[int])
    """Ranks that it waits for."""


class Heartbeats:
    """The notices of one job; `job` tells it from others that used the same store before."""

    def __init__(self, store: Store, job: str, *, rank: int, world_size: int) -> None:
        store.set_timeout(PATIENCE)
        self.job = job
        self._gone = False
        self._store = PrefixStore(f"watch/{job}", store)
        self.rank, self.world_size = rank, world_size

    @classmethod
    def of_job(cls, job: str, world: Group) -> "Heartbeats":
        """In the store that the job's processes met at, over a connection of its own."""
        store = _get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue]
        return cls(store, job, rank=world.rank, world_size=world.size)

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
        self._try(lambda: self._store.set(f"at/{self.rank}", json.dumps(asdict(sighting))))

    def sighting(self, rank: int) -> Sighting | None:
        """Where another process is."""
        found = self._get(f"at/{rank}")
        return None if found is None else Sighting(**json.loads(found))

    def publish_history(self, history: list[Collective]) -> None:
        """Say at which collectives this process has been."""
        rows = [[each.number, str(each)] for each in history]
        self._try(lambda: self._store.set(f"history/{self.rank}", json.dumps(rows)))

    def publish_last(self, collective: Collective) -> None:
        """Say to which collective this process comes now: a few microseconds, nobody answers."""
        key = f"last/{self.rank}/{collective.number % LAST}"
        self._try(lambda: self._store.set(key, f"{collective.number} {collective}"))

    def history(self, rank: int) -> dict[int, str]:
        """Collectives that another process has announced, by number."""
        published: dict[int, str] = dict(json.loads(self._get(f"history/{rank}") or "[]"))
        for place in range(LAST):
            number, _, label = (self._get(f"last/{rank}/{place}") or b"").decode().partition(" ")
            if label:
                published[int(number)] = label
        return published

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
