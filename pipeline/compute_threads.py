"""How many threads compute, and how they wait for one another.

A thread of an operator that has done its share waits for the others. GNU's OpenMP, which PyTorch's
Linux packages bring, has it spin for some milliseconds, so that the next operator finds it awake.
Where another program wants the core, it spins while the thread that all wait for has no core to
run on: a step of a small model then takes up to fifty times as long. So the threads of a step
spin only while no other program needs their cores. Else they sleep, on as many cores as the others
leave free: a thread that is woken on a core of its own waits there for its turn among the others,
and all wait for it, after every operator.

How threads wait, and where, changes no bit of a result; how many there are may.
"""

import ctypes
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch

from pipeline.errors import ConfigError
from pipeline.kernels.toolchain.threads import openmp_runtime
from pipeline.parallel import launched

logger = logging.getLogger(__name__)

THREADS = "RLHF_THREADS"
"""Variable of the environment: threads of each process, where the setting `threads` is null."""

DECIDED = (
    *("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"),
    *("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"),
)
"""Variables by which a user decides how threads wait, or where; then nothing is done here."""

POLL_SECONDS = 0.5

POLLS = 2
"""Looks in a row that agree before threads wait otherwise: what runs for a moment, such as a shell
command, slows spinning threads for that moment alone, and sleeping ones cost more."""

SLACK_CORES = 0.25
"""What others may use without harm: daemons, and the resolution of the system's clocks."""


@contextmanager
def compute_threads(number: int | None, *, announce: bool = True) -> Iterator[None]:
    """Compute with that many threads, which leave their cores to other programs while they wait.

    Args:
        number: of threads; None takes RLHF_THREADS, and without it as many as PyTorch does: those
            of OMP_NUM_THREADS, or one for each core.
        announce: log, once, that other programs need the cores.

    Raises:
        ConfigError: RLHF_THREADS is not a number above 0.
    """
    number = number or _from_environment()
    if number is not None:
        torch.set_num_threads(number)
    by_user = any(name in os.environ for name in DECIDED)
    team = None if by_user or torch.get_num_threads() == 1 else SleepyTeam.find()
    if team is None:
        yield
        return
    with _Observer(team, announce=announce):
        yield


def _from_environment() -> int | None:
    text = os.environ.get(THREADS)
    if not text:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"{THREADS} must be a number of threads above 0, got {text!r}")
    return int(text)


class SleepyTeam:
    """Has all threads of GNU's OpenMP sleep, not spin, while they wait, as long as it is held.

    The runtime gives up spinning where it has more threads than the process has cores (see
    GOMP_SPINCOUNT in its manual). This is a second team of threads, which sleep for good and make
    it so. There is no call that says it, and the variable is read when the library is loaded only.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._thread: threading.Thread | None = None
        self._release = threading.Event()

    @classmethod
    def find(cls) -> "SleepyTeam | None":
        """The team of PyTorch's runtime; None where that is another than GNU's."""
        runtime = openmp_runtime()
        if runtime is None or not Path(runtime).name.startswith("libgomp"):
            return None
        return cls(ctypes.CDLL(str(runtime)))

    @property
    def is_held(self) -> bool:
        """Whether threads sleep."""
        return self._thread is not None

    def hold(self) -> None:
        """Have threads sleep from now on."""
        if self._thread is None:
            held = threading.Event()
            self._release.clear()
            self._thread = threading.Thread(
                target=self._hold, args=(held,), name="sleepy-team", daemon=True
            )
            self._thread.start()
            held.wait()

    def release(self) -> None:
        """Have threads spin from now on."""
        if self._thread is not None:
            self._release.set()
            self._thread.join()
            self._thread = None

    def _hold(self, held: threading.Event) -> None:
        # One more, with those that compute, than there are cores.
        size = max(2, self._library.omp_get_num_procs() - torch.get_num_threads() + 2)
        nothing = ctypes.cast(self._library.omp_get_thread_num, ctypes.c_void_p)
        self._library.GOMP_parallel(nothing, None, ctypes.c_uint(size), ctypes.c_uint(0))
        held.set()
        self._release.wait()  # the team lives as long as the thread that has called it


class FewCores:
    """Has all threads of this process run on a few of its cores, as long as it is held.

    Processes that are started meanwhile stay there. Where the system can't bind threads, nothing
    happens.
    """

    def __init__(self) -> None:
        self._own = _cores()
        # Processes of one machine that share its cores keep out of each other's way.
        first = len(self._own) * launched.local_rank() // launched.local_world_size()
        self._order = self._own[first:] + self._own[:first]
        self._before: dict[int, set[int]] = {}
        self.number = 0
        """Of cores; 0 while the threads run wherever they may."""

    def hold(self, number: int) -> None:
        """Have threads run on that many cores from now on."""
        is_first = self.number == 0
        self.number = number
        for thread in _threads():
            with suppress(OSError):  # it has ended
                if is_first:
                    self._before[thread] = os.sched_getaffinity(thread)
                os.sched_setaffinity(thread, self._order[:number])

    def release(self) -> None:
        """Have threads run where they did before; those made since then, on all cores."""
        if self.number == 0:
            return
        self.number = 0
        for thread in _threads():
            with suppress(OSError):
                os.sched_setaffinity(thread, self._before.get(thread, self._own))
        self._before.clear()


def _threads() -> list[int]:
    """The system's numbers of this process's threads."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    return [int(each.name) for each in Path("/proc/self/task").iterdir()]


class _Observer:
    """A thread that has the computing ones wait as the machine's other programs need it.

    At the start they sleep, wherever they are: what the others need is not known yet.
    """

    def __init__(self, team: SleepyTeam, *, announce: bool) -> None:
        self._team, self._announces = team, announce
        self._few = FewCores()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="compute-threads", daemon=True)

    def __enter__(self) -> None:
        self._team.hold()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._few.release()
        self._team.release()

    def _run(self) -> None:
        cores, usage, looks = len(_cores()), OthersUsage(), _Looks()
        while not self._over.wait(POLL_SECONDS):
            others, computing = usage.cores(), torch.get_num_threads()
            looks.add(crowded=computing + others > cores + SLACK_CORES)
            if looks.agree and not looks.crowded:
                self._few.release()
                self._team.release()
            elif looks.agree:
                self._team.hold()
                free = max(1, round(cores - others))
                if free > self._few.number:  # what others use grows as these threads give way
                    self._few.hold(free)
                self._say(others, cores, computing)

    def _say(self, others: float, cores: int, computing: int) -> None:
        if self._announces:
            self._announces = False
            logger.info(
                "other programs use %.1f of the %d cores: %d threads share the rest, and sleep"
                " while they wait",
                others,
                cores,
                computing,
            )


class _Looks:
    """Whether cores are short, and whether the last `POLLS` looks agree about it."""

    def __init__(self) -> None:
        self.crowded = True
        self._alike = 0

    @property
    def agree(self) -> bool:
        """So that what runs for a moment changes nothing."""
        return self._alike >= POLLS

    def add(self, *, crowded: bool) -> None:
        """A look found that they are, or that they are not."""
        self._alike = self._alike + 1 if crowded == self.crowded else 1
        self.crowded = crowded


class OthersUsage:
    """Cores that other programs have used since the last look, of those this process may use."""

    def __init__(self) -> None:
        self._cores = _cores()
        self._before = self._look()

    def cores(self) -> float:
        """Mean number of busy cores, without what this process has used itself."""
        now, before = self._look(), self._before
        self._before = now
        seconds, busy, own = (new - old for new, old in zip(now, before, strict=True))
        return max(0.0, busy - own) / max(seconds, 1e-9)

    def _look(self) -> tuple[float, float, float]:
        """Clock, processor time of the cores, processor time of this process, in seconds."""
        each = psutil.cpu_times(percpu=True)
        busy = sum(_busy(each[core]) for core in self._cores if core < len(each))
        return time.perf_counter(), busy, time.process_time()


def _busy(times: object) -> float:
    # `user` has what guests used. `steal`, what a hypervisor took, is left out: waking a sleeping
    # core counts as such, so threads once asleep would seem to have company for ever.
    kinds = ("user", "nice", "system", "irq", "softirq")
    return sum(getattr(times, kind, 0.0) for kind in kinds)


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
