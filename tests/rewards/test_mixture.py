"""rewards/mixture.py and its worker processes, with real functions."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pipeline.data.examples import Message
from rewards.config import RewardConfig
from rewards.contract import Episode, SourceResults
from rewards.mixture import Rewards
from tests.rewards.processes import is_alive, worker_processes

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = Path(__file__).parent / "programs.py"


def function_source(name: str, *, weight: float = 1.0, column: str | None = None) -> RewardConfig:
    path = f"{PROGRAMS}:{name}"
    return RewardConfig(name=name, kind="function", path=path, weight=weight, column=column)


def make_episodes(*responses: str, answer: object = "4") -> list[Episode]:
    prompt = (Message("user", "2 + 2?"),)
    return [
        Episode(prompt, response, extra={"answer": answer}, slot=slot)
        for slot, response in enumerate(responses)
    ]


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_functions_of_every_form_run_unchanged() -> None:
    answer = {"column": "answer"}
    sources = [
        function_source("length"),
        function_source("slow_length"),
        function_source("trl_plain"),
        function_source("trl_messages"),
        function_source("openrlhf", **answer),
        function_source("verl", **answer),
    ]

    with Rewards(sources, workers=1) as rewards:
        rewards.submit(make_episodes("4", "five"))
        results = rewards.results()
        notes = " ".join(rewards.notes)

    assert results["length"].values == [1, 4]
    assert results["slow_length"].values == [1, 4]
    for name in ("trl_plain", "trl_messages", "openrlhf", "verl"):
        assert results[name] == SourceResults([1.0, 0.0], [None, None]), name
    assert list(results) == [source.name for source in sources]
    for form in ("(episodes)", "with text", "with messages", "OpenRLHF's", "verl's"):
        assert form in notes


def test_result_that_is_not_a_number_fails_only_its_response() -> None:
    failures = {
        "'0.5'": "it returned str '0.5' instead of a number or None",
        "[1]": "it returned list [1] instead of a number or None",
        "{'value': 1}": "it returned dict {'value': 1} instead of a number or None",
        "float('nan')": "it returned nan, which is not finite in fp32",
        "float('-inf')": "it returned -inf, which is not finite in fp32",
        "1e39": "it returned 1e+39, which is not finite in fp32",
        "1 / 0": "the call raised ZeroDivisionError: division by zero",
        "exit(3)": "the call terminated its process with exit code 3",
    }

    with Rewards([function_source("evaluate")], workers=1) as rewards:
        rewards.submit(make_episodes(*failures, "None", "True", "__import__('numpy').float32(2)"))
        result = rewards.results()["evaluate"]

    assert result.failures == [*failures.values(), None, None, None]
    assert result.values == [*[None] * len(failures), None, 1.0, 2.0]


def test_hanging_call_among_64_costs_only_its_deadline() -> None:
    responses = ["hang" if number == 5 else "" for number in range(64)]

    with Rewards([function_source("misbehave")], timeout_seconds=1.0) as rewards:
        start = time.monotonic()
        rewards.submit(make_episodes(*responses))
        submit_seconds = time.monotonic() - start
        results = rewards.results()
        seconds = time.monotonic() - start

    result = results["misbehave"]
    assert submit_seconds < 0.1
    assert seconds < 1.5
    assert result.failures[5] == "the call took longer than 1 s"
    assert result.num_failed == 1
    assert result.values == [None if number == 5 else 1.0 for number in range(64)]


def test_worker_survives_a_fork_and_is_replaced_if_it_dies_or_hangs() -> None:
    with Rewards([function_source("misbehave")], workers=1, timeout_seconds=0.3) as rewards:
        rewards.submit(make_episodes("exit", "spin", "fork", "exit", ""))
        result = rewards.results()["misbehave"]

    exited = "the call terminated its process with exit code 3"
    late = "the call took longer than 0.3 s"
    assert result == SourceResults([None, None, 1.0, None, 1.0], [exited, late, None, exited, None])


def test_killing_a_call_kills_its_descendants() -> None:
    mark = f"mark-{os.getpid()}"

    def orphans() -> list[psutil.Process]:
        return [p for p in worker_processes() if is_alive(p) and mark in p.cmdline()]

    source = function_source("misbehave", column="answer")
    with Rewards([source], workers=1, timeout_seconds=0.5) as rewards:
        rewards.submit(make_episodes("orphan", answer=mark))
        assert wait_until(lambda: bool(orphans()))
        rewards.results()

        assert wait_until(lambda: not orphans())


KILLED = """
import os, sys, time
from tests.rewards.test_mixture import function_source, make_episodes
from rewards.mixture import Rewards
rewards = Rewards([function_source("misbehave", column="answer")], timeout_seconds=60.0)
rewards.submit(make_episodes("spin", "orphan", answer=sys.argv[1]))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("victim", ["trainer", "supervisor"])
def test_workers_end_when_trainer_or_supervisor_is_killed(victim: str) -> None:
    mark = f"mark-{os.getpid()}-{victim}"
    command = [sys.executable, "-c", KILLED, mark]
    trainer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == b"ready\n"
    process = psutil.Process(trainer.pid)

    def children_without_mark() -> list[psutil.Process]:
        return [p for p in process.children(recursive=True) if mark not in p.cmdline()]

    # The supervisor, two workers, and the detached process of one of them, once it has the mark.
    assert wait_until(
        lambda: len(process.children(recursive=True)) == 4 and len(children_without_mark()) == 3
    )
    processes = process.children(recursive=True)
    attached = children_without_mark()

    os.kill(trainer.pid if victim == "trainer" else processes[0].pid, signal.SIGKILL)

    # Without the supervisor nothing kills a process that a function detached.
    expected = processes if victim == "trainer" else attached
    have_ended = wait_until(lambda: not any(map(is_alive, expected)))
    for child in [*processes, process]:
        if is_alive(child):
            child.kill()
    trainer.wait()
    trainer.stdout.close()
    assert have_ended


def test_edited_file_changes_the_fingerprint_but_not_the_running_function(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    source = "import os\ndef score(episodes):\n    if episodes[0].response: os._exit(1)\n"
    file.write_text(source + "    return [1.0]\n")
    config = RewardConfig(name="mine", kind="function", path=f"{file}:score")

    with Rewards([config], workers=1) as rewards:
        before = rewards.fingerprint
        file.write_text(source + "    return [2.0]\n")
        rewards.submit(make_episodes("end the process"))
        rewards.results()
        rewards.submit(make_episodes(""))
        values = rewards.results()["mine"].values
    with Rewards([config], workers=1) as restarted:
        after = restarted.fingerprint

    assert values == [1.0]
    assert before.keys() == after.keys() == {"mine"}
    assert before != after
