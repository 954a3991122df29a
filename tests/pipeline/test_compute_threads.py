"""How many threads compute, and how they wait: in processes of their own, as OpenMP starts once."""

import os
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from pipeline.compute_threads import OthersUsage, SleepyTeam, _Looks, compute_threads
from pipeline.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2 or SleepyTeam.find() is None,
    reason="needs two cores and GNU's OpenMP under PyTorch",
)

NAMES = ("OMP_NUM_THREADS", "RLHF_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")

PROGRAM = """
import hashlib, os, sys, threading, time
os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:2]))
import torch
from pipeline.compute_threads import SleepyTeam, compute_threads
values = torch.randn(99_999, generator=torch.Generator().manual_seed(0))
def step(count=20):
    started = time.perf_counter()
    for _ in range(count):
        result = torch.nn.functional.silu(values)
    return time.perf_counter() - started
def result():
    # Two threads meet within a vector of the processor, whose last elements are rounded otherwise.
    several = [torch.nn.functional.silu(values[:-n]) for n in range(1, 60, 2)]
    return hashlib.sha256(torch.cat(several).numpy().tobytes()).hexdigest()
step(1)
"""


def run(program: str, *words: str, **environment: str) -> list[str]:
    """What the program prints, word by word, with these variables and none of NAMES beside."""
    kept = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program, *words],
        cwd=ROOT,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Other programs, each of which wants one of the two cores that `PROGRAM` has."""
    cores = set(sorted(os.sched_getaffinity(0))[:2])
    loop = [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {cores})\nwhile True: pass"]
    others = [subprocess.Popen(loop) for _ in range(number)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def numbers(words: Sequence[str]) -> list[float]:
    return [float(word) for word in words]


def test_threads_of_a_held_team_sleep_between_operators() -> None:
    program = """
import resource
def sleeps():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    step(200)
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
team = SleepyTeam.find()
team.hold()
print(sleeps())
team.release()
"""
    (asleep,) = numbers(run(program))

    # Without it none sleeps where the cores are free, as waiting takes less than the runtime spins.
    assert asleep >= 100


@pytest.mark.jobs
def test_a_step_waits_asleep_from_its_start_and_while_others_want_the_cores() -> None:
    program = """
with compute_threads(None):
    for _ in range(6):
        names = [each.name for each in threading.enumerate()]
        print(int("sleepy-team" in names))
        time.sleep(0.4)
    print(len(os.sched_getaffinity(0)))
print(sum(each.name in ("sleepy-team", "compute-threads") for each in threading.enumerate()))
print(len(os.sched_getaffinity(0)))
"""
    with busy_processes(4):
        assert run(program) == ["1"] * 6 + ["1", "0", "2"]


def test_how_threads_wait_changes_no_bit() -> None:
    program = """
team = SleepyTeam.find()
print(result()); team.hold(); print(result()); team.release(); print(result())
torch.set_num_threads(1); print(result())
"""
    spinning, asleep, again, alone = run(program)

    assert spinning == asleep == again
    assert alone != spinning  # so that a changed number would have been seen


def test_a_moment_of_others_changes_nothing() -> None:
    looks, found = _Looks(), list[bool | None]()
    for crowded in (0, 1, 0, 0, 1, 0, 1, 1, 1, 0, 0):
        looks.add(crowded=bool(crowded))
        found.append(looks.crowded if looks.agree else None)

    assert found == [None] * 3 + [False] + [None] * 3 + [True, True, None, False]


@pytest.mark.jobs
def test_threads_run_on_few_cores_and_then_where_they_did_before() -> None:
    program = """
from pathlib import Path
from pipeline.compute_threads import FewCores
def where():
    threads = [int(each.name) for each in Path("/proc/self/task").iterdir()]
    return [sorted(os.sched_getaffinity(each)) for each in threads]
stop = threading.Event()
special = threading.Thread(target=lambda: (os.sched_setaffinity(0, {cores[1]}), stop.wait()))
cores = sorted(os.sched_getaffinity(0))
special.start()
time.sleep(0.2)
before = where()
few = FewCores()
few.hold(1)
later = threading.Thread(target=stop.wait)
later.start()
first = result()
print(all(each == cores[:1] for each in where()), few.number)
few.hold(2)
few.release()
print(where() == [*before, cores], few.number, result() == first)
stop.set()
"""
    assert run(program) == ["True", "1", "True", "0", "True"]
    second = program.replace("cores[:1]", "cores[1:]")  # of two processes, which share the cores
    environment = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert run(second, **environment) == ["True", "1", "True", "0", "True"]


def test_what_a_hypervisor_takes_is_no_other_program(monkeypatch: pytest.MonkeyPatch) -> None:
    times = namedtuple("times", ["user", "system", "idle", "steal"])
    looks = [times(1.0, 1.0, 8.0, 0.0), times(1.5, 1.25, 8.0, 90.0)]
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [looks.pop(0)] * cores * percpu)
    usage = OthersUsage()
    time.sleep(0.05)

    others = usage.cores()

    # Each core was busy for 0.75 s, and stolen for 90 s more.
    assert 0 < others <= 0.75 * cores / 0.05


@pytest.fixture
def _same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_same_threads")
def test_a_user_who_decides_how_threads_wait_is_let_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def watches() -> bool:
        return any(each.name == "compute-threads" for each in threading.enumerate())

    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    with compute_threads(2):
        assert watches()
    for name, value in (("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "1000")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with compute_threads(2):
                assert not watches()
    with compute_threads(1):
        assert not watches()


@pytest.mark.usefixtures("_same_threads")
def test_the_setting_wins_over_the_variable_and_that_over_pytorchs_own_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(2)
    monkeypatch.delenv("RLHF_THREADS", raising=False)
    with compute_threads(None):
        assert torch.get_num_threads() == 2
    monkeypatch.setenv("RLHF_THREADS", "3")
    with compute_threads(None):
        assert torch.get_num_threads() == 3
    with compute_threads(1):
        assert torch.get_num_threads() == 1


@pytest.mark.parametrize("value", ["0", "two", "-1", "1.5"])
def test_a_number_of_threads_that_is_none_is_a_sentence(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_THREADS", value)
    sentence = f"RLHF_THREADS must be a number of threads above 0, got '{value}'"
    with pytest.raises(ConfigError, match=sentence), compute_threads(None):
        pass
