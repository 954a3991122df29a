"""Reports of the processes of a job in its store, and the process that the others wait for.

The store is that of the rendezvous. torchrun's agent holds it, so that it outlives the processes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store  # it has no public name

from pipeline.parallel.group import Group

T = TypeVar("T")

PATIENCE = timedelta(seconds=5)
"""Longest wait for a reply of the store, which takes microseconds."""


@dataclass(frozen=True)
class Failure:
    """Why a job ends."""

    rank: int
    """The process that caused it."""

    what: str
    """A clause whose subject is that rank: `rank 1 failed: ValueError: ...`."""

    code: int
    """The exit code of every process."""

    stacks: bool = False
    """Whether every process shows the stacks of its threads."""


class Sighting(NamedTuple):
    """The position of a process at its last heartbeat."""

    number: int
    """Number of the last collective that it entered."""

    label: str
    seconds: float
    """Seconds since it arrived at this position."""

    beat: int
    """Number of heartbeats so far."""

    left: bool = False
    """It ended normally."""

    waits_for: tuple[int, ...] = ()
    """Ranks that it waits for; only reported by pipelines of several stages."""


class Notices:
    """The notices of one job, under a prefix of the store."""

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        self._store = store
        self.rank, self.world_size = rank, world_size
        self.gone = False
        """Whether the connection to the store is lost."""

    @classmethod
    def of_job(cls, job: str, world: Group) -> "Notices":
        """The notices in the default store, which this process reaches by a separate connection."""
        store = _get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue]
        store.set_timeout(PATIENCE)
        return cls(PrefixStore(f"watch/{job}", store), rank=world.rank, world_size=world.size)

    def post(self, failure: Failure) -> Failure:
        """Report why the job ends; return the failure that was reported first."""
        text = json.dumps(asdict(failure))
        first = self._try(lambda: self._store.compare_set("failure", "", text))
        return Failure(**json.loads(first)) if first else failure

    def failure(self) -> Failure | None:
        """Why the job ends, if it does."""
        text = self._get("failure")
        return None if text is None else Failure(**json.loads(text))

    def appear(self, sighting: Sighting) -> None:
        """Report the position of this process."""
        self._try(lambda: self._store.set(f"at/{self.rank}", json.dumps(sighting)))

    def sightings(self, ranks: Sequence[int]) -> dict[int, Sighting]:
        """The positions of these processes, as far as the store has them."""
        seen: dict[int, Sighting] = {}
        for rank in ranks:
            if (value := self._get(f"at/{rank}")) is not None:
                *fields, waits_for = json.loads(value)
                seen[rank] = Sighting(*fields, waits_for=tuple(waits_for))
        return seen

    def _get(self, key: str) -> bytes | None:
        return self._try(lambda: self._store.get(key) if self._store.check([key]) else None)

    def _try(self, query: Callable[[], T]) -> T | None:
        if self.gone:
            return None
        try:
            return query()
        except dist.DistNetworkError:  # torch prints a page for every further attempt
            self.gone = True
        except (RuntimeError, ValueError):  # the next request may succeed
            pass
        return None


def find_late(seen: Mapping[int, Sighting], timeout: float) -> Failure | None:
    """The process that is furthest behind, if one that is ahead has waited for `timeout` seconds.

    Args:
        seen: positions of processes that enter the same collectives, by rank.
        timeout: in seconds.
    """
    number, rank = min(((each.number, rank) for rank, each in seen.items()), default=(0, 0))
    ahead = {other: each for other, each in seen.items() if each.number > number and not each.left}
    waiting = max(ahead, key=lambda other: ahead[other].seconds, default=None)
    if waiting is None or ahead[waiting].seconds < timeout or seen[rank].left:
        return None
    missed = min(ahead.values())
    what = (
        f"rank {rank} did not come to {missed.label} (collective {missed.number}), where rank"
        f" {waiting} waited {ahead[waiting].seconds:.0f} s for it: {whereabouts(seen[rank])}"
    )
    return Failure(rank, what, 1, stacks=True)


def find_hanging_stage(seen: Mapping[int, Sighting], timeout: float) -> Failure | None:
    """The process at the end of the chain of those that wait for each other in a pipeline.

    Args:
        seen: positions of all processes, by rank.
        timeout: seconds for which the first of the chain must have waited.
    """
    stuck = {rank: each for rank, each in seen.items() if each.waits_for}
    first = max(stuck, key=lambda rank: stuck[rank].seconds, default=None)
    if first is None or stuck[first].seconds < timeout:
        return None
    chain = [first]
    while True:
        others = [rank for rank in stuck[chain[-1]].waits_for if rank not in chain]
        rank = min(others, key=lambda rank: rank in stuck, default=None)
        if rank is None:
            return None
        if rank not in stuck:
            break
        chain.append(rank)
    place = whereabouts(seen[rank]) if rank in seen else "it has reported nothing"
    through = "".join(f" through rank {each}" for each in chain[1:])
    what = (
        f"rank {rank} hangs: rank {first} waited {stuck[first].seconds:.0f} s for it{through}"
        f" at {stuck[first].label}: {place}"
    )
    return Failure(rank, what, 1, stacks=True)


def whereabouts(seen: Sighting) -> str:
    """The position of a process, as a clause."""
    if seen.number == 0:
        return "it has entered no collective yet"
    return f"its last was {seen.label} (collective {seen.number}), {seen.seconds:.0f} s ago"
