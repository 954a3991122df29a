"""Watches the processes of a job, and reports which one failed, was lost or hangs.

A thread of each process writes its position about once a second to the rendezvous store, which
torchrun's agent hosts, so that it outlives the processes; another thread reads the positions of the
others. A process that fails prints and reports its error, and the others stop with one line that
names it. If a process hangs, it is named, and all print their stacks. No process outlives the job,
since the second thread kills its process if it doesn't exit.
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
    is_out_of_memory,
)
from pipeline.system.position import POSITION, DesyncError

T = TypeVar("T")

TICK_SECONDS = 1.0

OBSERVERS = 2
"""Number of ranks, starting at 0, that read all positions, to limit the number of requests."""

STALLED_HEARTBEATS = 3
"""Number of heartbeats at the same position after which an observer reads all positions."""

HEARTBEAT_TIMEOUT_SECONDS = 60.0
"""Seconds without a heartbeat after which a process on another machine is considered lost."""

REPORT_WAIT_SECONDS = 3.0
"""Seconds that a process whose collective failed waits for another process's report."""

GRACE_SECONDS = 5.0
"""Seconds that a process has to exit after the job failed; half of that if processes hang."""

JOIN_TIMEOUT_SECONDS = 15.0
"""Seconds to wait for the threads to exit. A request to the store takes up to 5 s, and Python
aborts if the interpreter exits during one."""

COLLECTIVE_ERROR = re.compile(
    r"gloo|nccl|connection (closed|reset) by peer|timed out waiting|broken pipe", re.IGNORECASE
)
SHARED_ERRORS = (UserError, DivergedError)
"""Errors that all processes may raise together, with a complete message."""

STORE_TIMEOUT = timedelta(seconds=5)
"""Timeout of a request to the store, which normally takes microseconds."""


@dataclass(frozen=True)
class Failure:
    """The reason why a job stops."""

    rank: int
    """The process that caused the failure."""

    message: str
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

    sent: int
    """Number of heartbeats sent so far."""

    exited: bool = False
    """Whether the process exited normally."""

    awaited_ranks: tuple[int, ...] = ()
    """Ranks that the process waits for; only reported if processes run different collectives."""

    def describe(self) -> str:
        """Describe the position of the process in a clause."""
        if self.number == 0:
            return "it has entered no collective yet"
        return f"it was last at {self.label} (collective {self.number}), {self.seconds:.0f} s ago"


class StatusStore:
    """Heartbeats and the failure of one job in the default store, over a separate connection."""

    def __init__(self, job: str, world: Group) -> None:
        store = _get_default_store().clone()  # pyrefly: ignore[missing-attribute]
        store.set_timeout(STORE_TIMEOUT)
        self._store = PrefixStore(f"watch/{job}", store)
        self.rank, self.world_size = world.rank, world.size
        self.is_disconnected = False
        """Whether the connection to the store is lost."""

    def report(self, failure: Failure) -> Failure:
        """Report a failure of the job; return the failure that was reported first."""
        text = json.dumps(asdict(failure))
        first = self._request(lambda: self._store.compare_set("failure", "", text))
        return Failure(**json.loads(first)) if first else failure

    def get_failure(self) -> Failure | None:
        """Return the failure that stops the job, if any."""
        text = self._get("failure")
        return None if text is None else Failure(**json.loads(text))

    def publish(self, heartbeat: Heartbeat) -> None:
        """Publish the position of this process."""
        self._request(lambda: self._store.set(f"at/{self.rank}", json.dumps(heartbeat)))

    def heartbeats(self, ranks: Sequence[int]) -> dict[int, Heartbeat]:
        """Read the positions of these processes from the store."""
        positions: dict[int, Heartbeat] = {}
        for rank in ranks:
            if (value := self._get(f"at/{rank}")) is not None:
                *fields, awaited_ranks = json.loads(value)
                positions[rank] = Heartbeat(*fields, awaited_ranks=tuple(awaited_ranks))
        return positions

    def _get(self, key: str) -> bytes | None:
        return self._request(lambda: self._store.get(key) if self._store.check([key]) else None)

    def _request(self, query: Callable[[], T]) -> T | None:
        if self.is_disconnected:
            return None
        try:
            return query()
        except dist.DistNetworkError:  # each further attempt prints a long traceback
            self.is_disconnected = True
        except (RuntimeError, ValueError):  # the next request may succeed
            pass
        return None


def find_straggler(heartbeats: Mapping[int, Heartbeat], timeout: float) -> Failure | None:
    """Report the process that is furthest behind, if another has waited for `timeout` seconds.

    All processes in `heartbeats`, whose keys are ranks, enter the same collectives.
    """
    number, rank = min(((beat.number, rank) for rank, beat in heartbeats.items()), default=(0, 0))
    ahead = {
        other: beat
        for other, beat in heartbeats.items()
        if beat.number > number and not beat.exited
    }
    waiting = max(ahead, key=lambda other: ahead[other].seconds, default=None)
    if waiting is None or ahead[waiting].seconds < timeout or heartbeats[rank].exited:
        return None
    missed = min(ahead.values())
    message = (
        f"rank {rank} did not reach {missed.label} (collective {missed.number}), where rank"
        f" {waiting} waited {ahead[waiting].seconds:.0f} s for it: {heartbeats[rank].describe()}"
    )
    return Failure(rank, message, 1, stacks=True)


def find_hanging_process(heartbeats: Mapping[int, Heartbeat], timeout: float) -> Failure | None:
    """Report the last process of a chain in which each process waits for the next, if it hangs.

    It hangs if neither it nor the first process has made progress for `timeout` seconds.
    """
    waiting = {rank: beat for rank, beat in heartbeats.items() if beat.awaited_ranks}
    first = max(waiting, key=lambda rank: waiting[rank].seconds, default=None)
    if first is None or waiting[first].seconds < timeout:
        return None
    chain = [first]
    while True:
        others = [rank for rank in waiting[chain[-1]].awaited_ranks if rank not in chain]
        rank = min(others, key=lambda rank: rank in waiting, default=None)
        if rank is None:
            return None
        if rank not in waiting:
            break
        chain.append(rank)
    if rank in heartbeats and heartbeats[rank].seconds < timeout:
        return None
    position = heartbeats[rank].describe() if rank in heartbeats else "it sent no heartbeat"
    through = "".join(f" through rank {between}" for between in chain[1:])
    message = (
        f"rank {rank} hangs: rank {first} waited {waiting[first].seconds:.0f} s for it{through}"
        f" at {waiting[first].label}: {position}"
    )
    return Failure(rank, message, 1, stacks=True)


@contextmanager
def watch_processes(timeout_seconds: float) -> Iterator[None]:
    """Context manager that watches the processes of the job; all must enter it together.

    Raises:
        JobFailed: an error was printed, or another process failed.
    """
    watchdog = Watchdog(timeout_seconds)
    watchdog.start()
    try:
        yield
    except Exception as error:  # noqa: BLE001  # other processes must be notified of any error
        raise JobFailed(watchdog.report_error(error)) from None
    finally:
        watchdog.stop()


class Watchdog:
    """The watchdog of one process. All processes construct it together."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout = timeout_seconds
        world = current_mesh().world
        self.rank = world.rank
        self.store = StatusStore(world.gather_objects(uuid.uuid4().hex)[0], world)
        self.tick = min(TICK_SECONDS, timeout_seconds / 4)
        self._num_heartbeats, self._position, self._position_since = 0, (0, 0), time.monotonic()
        self.store.publish(Heartbeat(0, "none yet", 0.0, 0))
        host = os.uname().nodename
        hosts_and_pids = world.gather_objects((host, os.getpid()))
        self._local_processes = {
            rank: psutil.Process(pid)
            for rank, (name, pid) in enumerate(hosts_and_pids)
            if name == host and rank != self.rank and psutil.pid_exists(pid)
        }
        self._hosts = [name for name, _ in hosts_and_pids]
        self._last_heartbeats: dict[int, tuple[int, float]] = {}
        """The last heartbeat of each process, and when it was first read."""
        self._armed_at = -float("inf")
        self._print_lock = threading.RLock()
        self._has_printed = False
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True),
            threading.Thread(target=self._watch, name="watchdog", daemon=True),
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
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=JOIN_TIMEOUT_SECONDS)
        self._publish_heartbeat(exited=True)
        faulthandler.cancel_dump_traceback_later()
        if signal.getsignal(signal.SIGTERM) == self._stop_on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    # Status of this process

    def report_error(self, error: Exception) -> int:
        """Print the error, or its cause in another process; return the exit code."""
        if _is_collective_error(error):
            failure = _poll(REPORT_WAIT_SECONDS, self._find_failure) or self._find_exited()
            if failure is None:
                message = str(error)
                if not isinstance(error, DesyncError):
                    message = f"rank {self.rank} failed at {POSITION.last}: {_summary(error)}"
                failure = self.store.report(Failure(self.rank, message, 1, stacks=True))
            self._print_failure(failure, error)
            return failure.code
        summary = _summary(error)
        failure = Failure(self.rank, f"rank {self.rank} failed: {summary}", exit_code(error))
        first = self.store.report(failure)
        is_same = isinstance(error, SHARED_ERRORS) and first.message.endswith(summary)
        with self._print_lock:
            if first == failure:
                message = f"error: {' '.join(str(error).split())}"
                _print_error(message if isinstance(error, SHARED_ERRORS) else _traceback(error))
            elif not self._has_printed and not is_same:
                _print_error(f"rank {self.rank} also failed: {summary}")
            self._has_printed = True
        return first.code

    def _print_failure(self, failure: Failure, error: Exception | None = None) -> None:
        """Print once why this process stops, with its stacks if they are useful."""
        with self._print_lock:
            if self._has_printed:
                return
            self._has_printed = True
            text = failure.message
            if failure.rank == self.rank and error is None:
                text = f"rank {self.rank} stopped: {text}"
            elif failure.rank != self.rank:
                text = f"rank {self.rank} stopped because {text}"
            if failure.stacks:
                text += f"\nrank {self.rank} is here:\n"
                text += _stacks() if error is None else _traceback(error)
            _print_error(text)

    def _stop_on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Handle SIGTERM, sent by torchrun after a failure, or by a scheduler at any time."""
        failure = self._find_failure()
        if failure is not None:
            self._print_failure(failure)
            raise JobFailed(failure.code)
        self._publish_heartbeat(exited=True)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _publish_heartbeat(self, *, exited: bool = False) -> None:
        now, last = time.monotonic(), POSITION.last
        if (last.number, POSITION.transfers) != self._position:
            self._position, self._position_since = (last.number, POSITION.transfers), now
        self._num_heartbeats += 1
        self.store.publish(
            Heartbeat(
                number=last.number,
                label=POSITION.wait_reason or str(last),
                seconds=round(now - self._position_since, 3),
                sent=self._num_heartbeats,
                exited=exited,
                awaited_ranks=() if current_mesh().same_collectives else POSITION.awaited_ranks,
            )
        )

    # Status of the others

    def _find_failure(self) -> Failure | None:
        """Find the failure of the job: a reported one, or a lost process on this machine."""
        if (failure := self.store.get_failure()) is not None:
            return failure
        for rank, process in self._local_processes.items():
            if _is_alive(process):
                continue
            # Processes report before they exit: read the store after finding that one has exited.
            if (failure := self.store.get_failure()) is not None:
                return failure
            heartbeat = self.store.heartbeats([rank]).get(rank)
            if heartbeat is None or not heartbeat.exited:
                message = (
                    f"rank {rank} was lost (killed? out of memory?) while rank {self.rank} was"
                )
                return self.store.report(Failure(rank, f"{message} at {POSITION.last}", 1))
        return None

    def _find_exited(self) -> Failure | None:
        """Report a process that exited normally while this one waited for it."""
        for rank, heartbeat in self.store.heartbeats(range(self.store.world_size)).items():
            if heartbeat.exited:
                message = (
                    f"rank {rank} exited while rank {self.rank} waited for it at {POSITION.last}"
                )
                return self.store.report(Failure(rank, message, 1))
        return None

    def _check_progress(self) -> Failure | None:
        """If this process is stalled, find the cause: a late, hanging or lost process."""
        now = time.monotonic()
        stalled_seconds = now - self._position_since
        if sum(self._position) == 0:
            return None
        if stalled_seconds < min(STALLED_HEARTBEATS * self.tick, self.timeout):
            self._last_heartbeats.clear()
            return None
        if self.store.is_disconnected and stalled_seconds >= HEARTBEAT_TIMEOUT_SECONDS:
            message = f"contact with rank 0 was lost while rank {self.rank} was at {POSITION.last}"
            return Failure(0, message, 1, stacks=True)
        if self.rank >= OBSERVERS:
            return None
        heartbeats = self.store.heartbeats(range(self.store.world_size))
        silent = {rank: self._silent_seconds(rank, beat, now) for rank, beat in heartbeats.items()}
        heartbeats = {
            rank: beat._replace(seconds=beat.seconds + silent[rank])
            for rank, beat in heartbeats.items()
        }
        find = find_straggler if current_mesh().same_collectives else find_hanging_process
        return find(heartbeats, self.timeout) or self._find_silent(heartbeats, silent)

    def _silent_seconds(self, rank: int, heartbeat: Heartbeat, now: float) -> float:
        """Return the seconds since this process first read the heartbeat."""
        sent, since = self._last_heartbeats.get(rank, (heartbeat.sent, now))
        self._last_heartbeats[rank] = heartbeat.sent, since if sent == heartbeat.sent else now
        return now - self._last_heartbeats[rank][1]

    def _find_silent(
        self, heartbeats: Mapping[int, Heartbeat], silent: Mapping[int, float]
    ) -> Failure | None:
        for rank, heartbeat in heartbeats.items():
            silent_seconds = silent[rank]
            is_remote = rank not in (self.rank, *self._local_processes)
            if is_remote and silent_seconds >= HEARTBEAT_TIMEOUT_SECONDS and not heartbeat.exited:
                message = (
                    f"rank {rank} on {self._hosts[rank]} has sent nothing for"
                    f" {silent_seconds:.0f} s (killed? network down?): {heartbeat.describe()}"
                )
                return Failure(rank, message, 1)
        return None

    # Threads

    def _send_heartbeats(self) -> None:
        while not self._stopped.wait(self.tick):
            self._publish_heartbeat()

    def _watch(self) -> None:
        while not self._stopped.wait(self.tick):
            self._arm_fallback()
            failure = self._find_failure()
            if failure is None and (failure := self._check_progress()) is not None:
                failure = self.store.report(failure)
            if failure is not None:
                self._end_process(failure)
                return

    def _end_process(self, failure: Failure) -> None:
        """Print the reason, give the process time to exit, then kill it."""
        if failure.code in (EXIT_USER_ERROR, EXIT_DIVERGED):  # each process may raise the error
            self._stopped.wait(TICK_SECONDS)
        self._print_failure(failure)
        if not self._stopped.wait(GRACE_SECONDS / 2 if failure.stacks else GRACE_SECONDS):
            sys.stderr.flush()
            os._exit(failure.code)

    def _arm_fallback(self) -> None:
        """Make sure that the process prints its stacks and exits even if this thread stops."""
        now = time.monotonic()
        if now - self._armed_at >= self.timeout / 8:
            self._armed_at = now
            faulthandler.dump_traceback_later(self.timeout + GRACE_SECONDS, exit=True, file=2)


def _poll(seconds: float, find: Callable[[], Failure | None]) -> Failure | None:
    """Call `find` until it returns a result, but for at most `seconds` seconds."""
    deadline = time.monotonic() + seconds
    while (failure := find()) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return failure


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _is_collective_error(error: Exception) -> bool:
    """Return whether the error may be caused by a failure of another process."""
    if is_out_of_memory(error):  # while NCCL allocated its buffers, for example
        return False
    if isinstance(error, DesyncError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and COLLECTIVE_ERROR.search(str(error)) is not None


def _summary(error: Exception) -> str:
    """Return the type and first line of an error."""
    first_line = " ".join(str(error).splitlines()[:1])
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def _traceback(error: Exception) -> str:
    """Format the traceback as Python shows it, without the frames of this module."""
    frames = error.__traceback__
    own_frames = ("watch_processes", "process_group")
    while frames is not None and frames.tb_frame.f_code.co_name in own_frames:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _stacks() -> str:
    """Return the Python stacks of the other threads of this process."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read().decode(errors="replace").split("\n\n")
    return "\n\n".join(stack for stack in stacks if not stack.startswith("Current thread"))


def _print_error(text: str) -> None:
    """Write lines to standard error in one call."""
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()
