"""Watches the processes of a job: reports which one failed, was lost, or hangs.

A thread of each process writes its position about once a second to the rendezvous store, which
torchrun's agent hosts, so that it outlives the processes; another thread reads the positions of the
others. A process that fails prints and reports its error, and the others stop with one line that
names it. If a process hangs, it is named, and all print their stacks. No process outlives the job:
the thread ends a process that doesn't exit.
"""

import faulthandler
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType
from typing import NamedTuple, TypeVar

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store  # no public API

from pipeline.parallel.group import Group
from pipeline.parallel.mesh import current_mesh
from pipeline.system.errors import (
    EXIT_DIVERGED,
    EXIT_USER_ERROR,
    DivergedError,
    JobFailed,
    UserError,
    exit_code,
)
from pipeline.system.position import HERE, DesyncError

T = TypeVar("T")

TICK_SECONDS = 1.0

OBSERVERS = 2
"""Number of ranks, from the first, that read all positions, so that requests grow linearly."""

STANDING_STILL = 3
"""Heartbeats at one position after which an observer reads all positions."""

SILENCE_SECONDS = 60.0
"""Seconds without a heartbeat after which a process on another machine counts as lost."""

HEARING_SECONDS = 3.0
"""Seconds that a process whose collective failed waits for another process's report."""

GRACE_SECONDS = 5.0
"""Seconds for a process to exit after the job failed; half of that if processes hang."""

LEAVING_SECONDS = 15.0
"""Seconds for the threads to end. A request to the store takes up to 5 s, and Python aborts if the
interpreter exits during one."""

OF_COLLECTIVES = re.compile(
    r"gloo|nccl|connection (closed|reset) by peer|timed out waiting|broken pipe", re.IGNORECASE
)
ONE_SENTENCE = (UserError, DivergedError)
"""Errors that all processes may raise together, with a complete message."""

PATIENCE = timedelta(seconds=5)
"""Timeout of a request to the store, which normally takes microseconds."""


@dataclass(frozen=True)
class Failure:
    """The reason why a job ends."""

    rank: int
    """The process that caused the failure."""

    what: str
    """A clause whose subject is that rank: `rank 1 failed: ValueError: ...`."""

    code: int
    """The exit code of every process."""

    stacks: bool = False
    """Whether every process prints the stacks of its threads."""


class Heartbeat(NamedTuple):
    """The position of a process at its last heartbeat."""

    number: int
    """Number of the last collective that the process entered."""

    label: str
    seconds: float
    """Seconds since the process reached this position."""

    beat: int
    """Number of heartbeats sent so far."""

    left: bool = False
    """Whether the process exited normally."""

    waits_for: tuple[int, ...] = ()
    """Ranks that the process waits for; only reported by pipelines with several stages."""


class Notices:
    """The notices of one job in the default store, over a separate connection."""

    def __init__(self, job: str, world: Group) -> None:
        store = _get_default_store().clone()  # pyrefly: ignore[missing-attribute]
        store.set_timeout(PATIENCE)
        self._store = PrefixStore(f"watch/{job}", store)
        self.rank, self.world_size = world.rank, world.size
        self.gone = False
        """Whether the connection to the store is lost."""

    def post(self, failure: Failure) -> Failure:
        """Report a failure of the job; return the failure that was reported first."""
        text = json.dumps(asdict(failure))
        first = self._try(lambda: self._store.compare_set("failure", "", text))
        return Failure(**json.loads(first)) if first else failure

    def failure(self) -> Failure | None:
        """The failure that ends the job, if any."""
        text = self._get("failure")
        return None if text is None else Failure(**json.loads(text))

    def appear(self, sighting: Heartbeat) -> None:
        """Publish the position of this process."""
        self._try(lambda: self._store.set(f"at/{self.rank}", json.dumps(sighting)))

    def heartbeats(self, ranks: Sequence[int]) -> dict[int, Heartbeat]:
        """The positions of these processes in the store."""
        seen: dict[int, Heartbeat] = {}
        for rank in ranks:
            if (value := self._get(f"at/{rank}")) is not None:
                *fields, waits_for = json.loads(value)
                seen[rank] = Heartbeat(*fields, waits_for=tuple(waits_for))
        return seen

    def _get(self, key: str) -> bytes | None:
        return self._try(lambda: self._store.get(key) if self._store.check([key]) else None)

    def _try(self, query: Callable[[], T]) -> T | None:
        if self.gone:
            return None
        try:
            return query()
        except dist.DistNetworkError:  # each further attempt prints a long traceback
            self.gone = True
        except (RuntimeError, ValueError):  # the next request may succeed
            pass
        return None


def find_late(seen: Mapping[int, Heartbeat], timeout: float) -> Failure | None:
    """The process that is furthest behind, if another one has waited for `timeout` seconds.

    Args:
        seen: positions of processes that enter the same collectives, by rank.
        timeout: seconds that the other process must have waited.
    """
    number, rank = min(((each.number, rank) for rank, each in seen.items()), default=(0, 0))
    ahead = {other: each for other, each in seen.items() if each.number > number and not each.left}
    waiting = max(ahead, key=lambda other: ahead[other].seconds, default=None)
    if waiting is None or ahead[waiting].seconds < timeout or seen[rank].left:
        return None
    missed = min(ahead.values())
    what = (
        f"rank {rank} did not reach {missed.label} (collective {missed.number}), where rank"
        f" {waiting} waited {ahead[waiting].seconds:.0f} s for it: {whereabouts(seen[rank])}"
    )
    return Failure(rank, what, 1, stacks=True)


def find_hanging_stage(seen: Mapping[int, Heartbeat], timeout: float) -> Failure | None:
    """The failure of the last process in a chain of waiting pipeline processes, if it hangs.

    Args:
        seen: positions of all processes, by rank.
        timeout: seconds that the first process of the chain must have waited.
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


def whereabouts(seen: Heartbeat) -> str:
    """The position of a process, as a clause."""
    if seen.number == 0:
        return "it has entered no collective yet"
    return f"its last was {seen.label} (collective {seen.number}), {seen.seconds:.0f} s ago"


@contextmanager
def watching(timeout_seconds: float) -> Iterator[None]:
    """Watch the processes of the job, all of which must enter together.

    Raises:
        JobFailed: an error occurred that has been printed, or is the consequence of another
            process's.
    """
    watchdog = Watchdog(timeout_seconds)
    watchdog.start()
    try:
        yield
    except Exception as error:  # noqa: BLE001  # other processes must learn of any error
        raise JobFailed(watchdog.fail(error)) from None
    finally:
        watchdog.stop()


class Watchdog:
    """The watchdog of one process. All processes construct it together."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout = timeout_seconds
        world = current_mesh().world
        self.rank = world.rank
        self.notices = Notices(world.gather_objects(uuid.uuid4().hex)[0], world)
        self.tick = min(TICK_SECONDS, timeout_seconds / 4)
        self._beats, self._place, self._since = 0, (0, 0), time.monotonic()
        self.notices.appear(Heartbeat(0, "none yet", 0.0, 0))
        host = os.uname().nodename
        pids = world.gather_objects((host, os.getpid()))
        self._local = {
            rank: psutil.Process(pid)
            for rank, (name, pid) in enumerate(pids)
            if name == host and rank != self.rank and psutil.pid_exists(pid)
        }
        self._hosts = [name for name, _ in pids]
        self._heard: dict[int, tuple[int, float]] = {}
        """The last heartbeat of each process, and when it was first read."""
        self._armed_at = -float("inf")
        self._speaking = threading.RLock()
        self._has_spoken = False
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._beat, name="heartbeat", daemon=True),
            threading.Thread(target=self._run, name="watchdog", daemon=True),
        ]

    def start(self) -> None:
        """Start watching."""
        # A failed collective fails again in the engine's cleanup; only the first error matters.
        warnings.filterwarnings("ignore", message="module forward hook with ``always_call")
        on_main = threading.current_thread() is threading.main_thread()
        if on_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._stop_on_signal)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop the watchdog; the others no longer expect heartbeats from this process."""
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=LEAVING_SECONDS)
        self._appear(left=True)
        faulthandler.cancel_dump_traceback_later()
        if signal.getsignal(signal.SIGTERM) == self._stop_on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    # Reports of this process

    def fail(self, error: Exception) -> int:
        """Print the error, or its cause in another process; return the exit code."""
        if _is_of_collectives(error):
            failure = _within(HEARING_SECONDS, self._cause) or self._find_left()
            if failure is None:
                what = str(error)
                if not isinstance(error, DesyncError):
                    what = f"rank {self.rank} failed at {HERE.last}: {_summary(error)}"
                failure = self.notices.post(Failure(self.rank, what, 1, stacks=True))
            self._speak(failure, error)
            return failure.code
        own = Failure(self.rank, f"rank {self.rank} failed: {_summary(error)}", exit_code(error))
        first = self.notices.post(own)
        same = isinstance(error, ONE_SENTENCE) and first.what.endswith(_summary(error))
        with self._speaking:
            if first == own:
                sentence = f"error: {' '.join(str(error).split())}"
                _write(sentence if isinstance(error, ONE_SENTENCE) else _traceback(error))
            elif not self._has_spoken and not same:
                _write(f"rank {self.rank} also failed: {_summary(error)}")
            self._has_spoken = True
        return first.code

    def _speak(self, failure: Failure, error: Exception | None = None) -> None:
        """Print once why this process stops, with its stacks if they are useful."""
        with self._speaking:
            if self._has_spoken:
                return
            self._has_spoken = True
            lines = failure.what
            if failure.rank == self.rank and error is None:
                lines = f"rank {self.rank} stopped: {lines}"
            elif failure.rank != self.rank:
                lines = f"rank {self.rank} stopped because {lines}"
            if failure.stacks:
                lines += f"\nrank {self.rank} is here:\n"
                lines += _stacks() if error is None else _traceback(error)
            _write(lines)

    def _stop_on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Handle SIGTERM, sent by torchrun after a failure, or by a scheduler at any time."""
        failure = self._cause()
        if failure is not None:
            self._speak(failure)
            raise JobFailed(failure.code)
        self._appear(left=True)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _appear(self, *, left: bool = False) -> None:
        now, last = time.monotonic(), HERE.last
        if (last.number, HERE.transfers) != self._place:
            self._place, self._since = (last.number, HERE.transfers), now
        self._beats += 1
        in_stages = current_mesh().stages.size > 1
        self.notices.appear(
            Heartbeat(
                number=last.number,
                label=HERE.waits_at or str(last),
                seconds=round(now - self._since, 3),
                beat=self._beats,
                left=left,
                waits_for=HERE.waits_for if in_stages else (),
            )
        )

    # Reports of the others

    def _cause(self) -> Failure | None:
        """The failure of the job: a reported one, or a lost process on this machine."""
        failure = self.notices.failure()
        if failure is not None:
            return failure
        for rank, process in self._local.items():
            if _lives(process):
                continue
            # Processes report before they exit: read the store after finding that one is gone.
            if (failure := self.notices.failure()) is not None:
                return failure
            seen = self.notices.heartbeats([rank]).get(rank)
            if seen is None or not seen.left:
                what = f"rank {rank} was lost (killed? out of memory?) while rank {self.rank} was"
                return self.notices.post(Failure(rank, f"{what} at {HERE.last}", 1))
        return None

    def _find_left(self) -> Failure | None:
        """A process that exited normally while this one waited for it."""
        for rank, seen in self.notices.heartbeats(range(self.notices.world_size)).items():
            if seen.left:
                what = f"rank {rank} exited while rank {self.rank} waited for it at {HERE.last}"
                return self.notices.post(Failure(rank, what, 1))
        return None

    def _look(self) -> Failure | None:
        """The failure to report if this process makes no progress: a late, hung or lost process."""
        now = time.monotonic()
        still = now - self._since
        if sum(self._place) == 0:
            return None
        if still < min(STANDING_STILL * self.tick, self.timeout):
            self._heard.clear()
            return None
        if self.notices.gone and still >= SILENCE_SECONDS:
            what = f"rank 0 was lost: rank {self.rank} lost its store while at {HERE.last}"
            return Failure(0, what, 1, stacks=True)
        if self.rank >= OBSERVERS:
            return None
        seen = self.notices.heartbeats(range(self.notices.world_size))
        in_stages = current_mesh().stages.size > 1
        find = find_hanging_stage if in_stages else find_late
        return find(seen, self.timeout) or self._find_silent(seen, now)

    def _find_silent(self, seen: dict[int, Heartbeat], now: float) -> Failure | None:
        for rank, each in seen.items():
            beat, since = self._heard.get(rank, (each.beat, now))
            self._heard[rank] = each.beat, since if beat == each.beat else now
            silent = now - self._heard[rank][1]
            is_remote = rank not in (self.rank, *self._local)
            if is_remote and silent >= SILENCE_SECONDS and not each.left:
                what = (
                    f"rank {rank} on {self._hosts[rank]} has sent nothing for {silent:.0f} s"
                    f" (killed? network down?): {whereabouts(each)}"
                )
                return Failure(rank, what, 1)
        return None

    # Threads

    def _beat(self) -> None:
        while not self._over.wait(self.tick):
            self._appear()

    def _run(self) -> None:
        while not self._over.wait(self.tick):
            self._arm()
            failure = self._cause()
            if failure is None and (failure := self._look()) is not None:
                failure = self.notices.post(failure)
            if failure is not None:
                self._obey(failure)
                return

    def _obey(self, failure: Failure) -> None:
        """Print the reason, give the process time to exit, then end it."""
        if failure.code in (EXIT_USER_ERROR, EXIT_DIVERGED):  # each process may hit it on its own
            self._over.wait(TICK_SECONDS)
        self._speak(failure)
        if not self._over.wait(GRACE_SECONDS / 2 if failure.stacks else GRACE_SECONDS):
            sys.stderr.flush()
            os._exit(failure.code)

    def _arm(self) -> None:
        """Make sure that the process prints its stacks and ends even if this thread stops."""
        now = time.monotonic()
        if now - self._armed_at >= self.timeout / 8:
            self._armed_at = now
            faulthandler.dump_traceback_later(self.timeout + GRACE_SECONDS, exit=True, file=2)


def _within(seconds: float, look: Callable[[], Failure | None]) -> Failure | None:
    """Call `look` until it returns a result, for at most a number of seconds."""
    deadline = time.monotonic() + seconds
    while (found := look()) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _is_of_collectives(error: Exception) -> bool:
    """Whether the error may be the consequence of another process's."""
    if isinstance(error, DesyncError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and OF_COLLECTIVES.search(str(error)) is not None


def _summary(error: Exception) -> str:
    """Type and first line of an error."""
    first = " ".join(str(error).splitlines()[:1])
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _traceback(error: Exception) -> str:
    """The traceback as Python shows it, without the frames of this module."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_name in ("watching", "process_group"):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _stacks() -> str:
    """The Python stacks of the other threads of this process."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read().decode(errors="replace").split("\n\n")
    return "\n\n".join(each for each in stacks if not each.startswith("Current thread"))


def _write(text: str) -> None:
    """Write lines to standard error in one call."""
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()
