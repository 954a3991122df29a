"""The watchdog of a job of thousands of processes, by its own code, in simulated time.

Each pretended process has the objects that a real one has - position, heartbeats, lookout - and the
simulator calls them when its threads would. The store is a dictionary that counts what it is asked
for; some of its answers come late, or after their caller has given up, which costs the calling
thread that time.
"""

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch.distributed as dist
from torch._C._distributed_c10d import Store as TorchStore

from pipeline.parallel.group import Group
from pipeline.parallel.mesh import Mesh
from pipeline.position import Position
from pipeline.watchdog.attribution import Attribution, Identity
from pipeline.watchdog.heartbeats import PATIENCE, Failure, Heartbeats
from pipeline.watchdog.lookout import Lookout

NO_PROCESS = 2**22
"""Numbers from here on are no process of this machine."""

NODE = 8
"""Processes of a machine."""

LONGEST_DELAY = 20.0
"""Seconds of a slow answer."""

BEATS, LOOKS = 0, 1
"""Threads of a process, each with delays of its own."""

COLLECTIVE = ("all_gather", "model.layers.0 (engine)", 2**20)
"""To which all come, again and again."""

MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def delay_of(seed: int, slow: float, rank: int, thread: int, number: int) -> float:
    """Seconds that an answer takes: 0, or of so many one takes up to `LONGEST_DELAY`.

    Drawn by a hash (splitmix64) of which answer it is, so that it doesn't hang on the order.
    """
    word = _mixed((((seed * 2 + thread) << 40) + (rank << 24)) * MIX[0] + number * MIX[1])
    if not slow or (word >> 11) * 2.0**-53 >= slow:
        return 0.0
    return (_mixed(word + MIX[0]) >> 11) * 2.0**-53 * LONGEST_DELAY


def _mixed(word: int) -> int:
    word &= 2**64 - 1
    word = (word ^ (word >> 30)) * MIX[1] & 2**64 - 1
    word = (word ^ (word >> 27)) * MIX[2] & 2**64 - 1
    return word ^ (word >> 31)


@dataclass
class Store:
    """What all processes share, and counts of what they asked it for."""

    values: dict[str, bytes] = field(default_factory=dict[str, bytes])
    requests: int = 0
    keys: int = 0
    """Read or written, of which one request may have many."""

    num_bytes: int = 0
    turns: list[str] = field(default_factory=list[str])
    """Whose turn it was to look, in the order in which it changed."""

    def count(self, *words: str | bytes, keys: int = 1) -> None:
        """Count a request with its answer."""
        self.requests += 1
        self.keys += keys
        self.num_bytes += sum(map(len, words))


class Connection:
    """One process's side of the store, as far as the watchdog uses one."""

    def __init__(self, store: Store, rank: int, seed: int) -> None:
        self.store, self.slow = store, 0.0
        self._rank, self._seed = rank, seed
        self.thread = BEATS
        """Which one calls."""
        self.answers = [0, 0]
        """That each thread has had."""
        self.delay = 0.0
        """Seconds that its calls took since this was set to zero."""

    def has_extended_api(self) -> bool:
        """Whether it reads many keys at once."""
        return True

    def _answer(self) -> None:
        """Take time, now and then, and of that now and then too much."""
        if not self.slow:
            return
        number = self.answers[self.thread]
        self.answers[self.thread] += 1
        seconds = delay_of(self._seed, self.slow, self._rank, self.thread, number)
        patience = PATIENCE.total_seconds()
        self.delay += min(seconds, patience)
        if seconds > patience:
            raise dist.DistStoreError("wait timeout")

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self.store.count(key, value)
        self._answer()
        self.store.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        """Read a value that is there."""
        value = self.store.values[key]
        self.store.count(key, value)
        self._answer()
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        self.store.count(*keys, keys=len(keys))
        self._answer()
        return all(key in self.store.values for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Read values that are there."""
        values = [self.store.values[key] for key in keys]
        self.count_keys(*keys, *values, keys=len(keys))
        return values

    def count_keys(self, *words: str | bytes, keys: int) -> None:
        """Count a request for that many keys, and wait for its answer."""
        self.store.count(*words, keys=keys)
        self._answer()

    def add(self, key: str, number: int) -> int:
        """Add to a counter; what it is then."""
        value = int(self.store.values.get(key, b"0")) + number
        self.store.count(key)
        self._answer()
        self.store.values[key] = str(value).encode()
        return value

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a value where another is, or none; what is there then."""
        found = self.store.values.get(key)
        self.store.count(key, expected, desired)
        self._answer()
        if found == expected.encode() or (found is None and not expected):
            if desired != expected and key.startswith("turn/"):
                self.store.turns.append(desired)
            self.store.values[key] = desired.encode()
            return desired.encode()
        return expected.encode() if found is None else found


@dataclass
class Process:
    """A pretended process."""

    position: Position
    connection: Connection
    lookout: Lookout
    is_lost: bool = False
    """Its machine is gone: it neither beats nor looks."""


class Job:
    """Processes that watch each other, eight on a machine, and the time that has passed."""

    def __init__(
        self, size: int, *, timeout_seconds: float, slow: float = 0.0, seed: int = 0
    ) -> None:
        self.now = 0.0
        self.size, self.timeout = size, timeout_seconds
        self.store, self.choose, self._seed = Store(), random.Random(seed), seed
        self._events: list[tuple[float, int, Callable[[], float]]] = []
        self._event = 0
        self.found: Failure | None = None
        self.found_at = 0.0
        ranks = tuple(range(size))
        known = [Identity(f"machine-{rank // NODE}", NO_PROCESS + rank, 0.0) for rank in ranks]
        self.processes = [self._process(rank, ranks, known, slow) for rank in ranks]
        for process in self.processes:
            pace = process.lookout.pace
            # Processes start within a pace of each other, and stay that far apart.
            self.at(self.choose.uniform(0, pace), self._beats(process))
            self.at(self.choose.uniform(0, pace), self._looks(process))

    def _process(
        self, rank: int, ranks: tuple[int, ...], known: list[Identity], slow: float
    ) -> Process:
        world = Group(rank, ranks)
        mesh = Mesh(world=world, data=world)
        connection, position = Connection(self.store, rank, self._seed), Position()
        store = cast("TorchStore", connection)
        heartbeats = Heartbeats(store, "job", rank=rank, world_size=self.size)
        attribution = Attribution(heartbeats, known, position=position, mesh=lambda: mesh)
        heartbeats.begin()
        connection.slow = slow
        lookout = Lookout(
            attribution,
            timeout_seconds=self.timeout,
            position=position,
            mesh=lambda: mesh,
            clock=lambda: self.now + connection.delay,
        )
        return Process(position, connection, lookout)

    def at(self, time: float, do: Callable[[], float]) -> None:
        """Call `do` at that time, and again that many seconds later as it says."""
        self._event += 1
        heapq.heappush(self._events, (time, self._event, do))

    def run(self, until: float) -> None:
        """Let time pass, until a process has found somebody at fault."""
        while self.found is None and self._events and self._events[0][0] <= until:
            self.now, number, do = self._events[0]
            again = do()
            heapq.heapreplace(self._events, (self.now + again, number, do))
        self.now = max(self.now, until) if self.found is None else self.now

    def enter_collective(self, *, but: Sequence[int] = ()) -> None:
        """All come to one, but for these."""
        for rank, process in enumerate(self.processes):
            if rank not in but:
                process.position.enter_collective(*COLLECTIVE)

    def come_late(self, rank: int) -> None:
        """A process comes to the collective that the others are at."""
        self.processes[rank].position.enter_collective(*COLLECTIVE)

    def _beats(self, process: Process) -> Callable[[], float]:
        def beat() -> float:
            process.connection.delay, process.connection.thread = 0.0, BEATS
            if not process.is_lost:
                process.lookout.beat()
            return process.lookout.pace + process.connection.delay

        return beat

    def _looks(self, process: Process) -> Callable[[], float]:
        """A failure that was posted is looked for every tick; here as often as at the others."""
        has_looked_for_failures = False

        def look() -> float:
            nonlocal has_looked_for_failures
            connection, lookout = process.connection, process.lookout
            connection.delay, connection.thread = 0.0, LOOKS
            if process.is_lost:
                return lookout.pace
            if not has_looked_for_failures:
                lookout.heartbeats.failure()
                has_looked_for_failures = True
                if connection.delay:  # what comes after a slow answer is asked after it
                    return connection.delay
            has_looked_for_failures = False
            found = lookout.look()
            if found is not None and lookout.heartbeats.claim():
                self.found, self.found_at = found, self.now + connection.delay
            return lookout.pace + connection.delay

        return look


class Simulated(Protocol):
    """A job in simulated time."""

    now: float
    found: Failure | None
    choose: random.Random

    def enter_collective(self, *, but: Sequence[int] = ()) -> None:
        """All come to one, but for these."""
        ...

    def come_late(self, rank: int) -> None:
        """A process comes to the collective that the others are at."""
        ...

    def run(self, until: float) -> None:
        """Let time pass, until a process has found somebody at fault."""
        ...


def healthy(job: Simulated, size: int, minutes: float, *, timeout_seconds: float) -> Failure | None:
    """Who is blamed in a job in which nobody keeps the others waiting for too long.

    It steps every 5 to 20 seconds. Every half an hour a process comes last by up to nine tenths of
    the timeout, as where it writes an export.
    """
    end, pause = 60 * minutes, 1800.0
    while job.now < end and job.found is None:
        if job.now >= pause:
            last = job.choose.randrange(size)
            job.enter_collective(but=[last])
            job.run(job.now + job.choose.uniform(0.5, 0.9) * timeout_seconds)
            job.come_late(last)
            pause = job.now + 1800.0
        job.enter_collective()
        job.run(job.now + job.choose.uniform(5, 20))
    return job.found


@dataclass(frozen=True)
class Look:
    """What a job that stands still asks the store for while each process looks once."""

    requests: int
    keys: int
    num_bytes: int
    seconds: float
    """Between two looks."""


def look(size: int, *, timeout_seconds: float = 1800.0) -> Look:
    """Of all processes together, their heartbeats included."""
    job = Job(size, timeout_seconds=timeout_seconds)
    job.enter_collective(but=[size - 1])
    job.run(60.0)
    pace = job.processes[0].lookout.pace
    before = job.store.requests, job.store.keys, job.store.num_bytes
    job.run(60.0 + pace)
    after = job.store.requests, job.store.keys, job.store.num_bytes
    return Look(*(late - early for early, late in zip(before, after, strict=True)), seconds=pace)


def detections(size: int, trials: int, *, slow: float) -> Iterator[tuple[str, float]]:
    """What happened, and after how many seconds from its deadline it was found, for each trial.

    A process that hangs has its timeout; a machine that is lost its minute of silence.
    """
    timeout, silence = 120.0, 60.0
    for trial in range(trials):
        job = Job(size, timeout_seconds=timeout, slow=slow, seed=trial)
        job.enter_collective()
        job.run(job.choose.uniform(10, 20))
        guilty = job.choose.randrange(size)
        machine = range(guilty - guilty % NODE, min(guilty - guilty % NODE + NODE, size))
        is_lost = trial % 2 == 1
        for rank in machine if is_lost else ():
            job.processes[rank].is_lost = True
        job.enter_collective(but=machine if is_lost else [guilty])
        deadline = job.now + (silence if is_lost else timeout)
        job.run(deadline + 120.0)
        assert job.found is not None, f"nobody found rank {guilty} of {size}"
        assert job.found.rank in (machine if is_lost else [guilty]), job.found.what
        yield ("lost" if is_lost else "hangs"), job.found_at - deadline
