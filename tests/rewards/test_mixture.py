"""rewards/mixture.py and the processes below it, with real functions in real processes."""

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
from rewards.contract import Episode, Scored
from rewards.mixture import Rewards
from tests.rewards.processes import alive, descendants

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = Path(__file__).parent / "programs.py"


def function(name: str, *, weight: float = 1.0, column: str | None = None) -> RewardConfig:
    path = f"{PROGRAMS}:{name}"
    return RewardConfig(name=name, kind="function", path=path, weight=weight, column=column)


def episodes(*responses: str, answer: object = "4") -> list[Episode]:
    prompt = (Message("user", "2 + 2?"),)
    return [
        Episode(prompt, response, extra={"answer": answer}, slot=slot)
        for slot, response in enumerate(responses)
    ]


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_functions_of_every_form_run_unchanged() -> None:
    answer = {"column": "answer"}
    sources = [
        function("length"),
        function("slow_length"),
        function("trl_plain"),
        function("trl_messages"),
        function("openrlhf", **answer),
        function("verl", **answer),
    ]

    with Rewards(sources, workers=1) as rewards:
        rewards.submit(episodes("4", "five"))
        verdicts = rewards.results()
        notes = " ".join(rewards.notes)

    assert verdicts["length"].values == [1, 4]
    assert verdicts["slow_length"].values == [1, 4]
    for name in ("trl_plain", "trl_messages", "openrlhf", "verl"):
        assert verdicts[name] == Scored([1.0, 0.0], [None, None]), name
    assert list(verdicts) == [source.name for source in sources]
    for form in ("(episodes)", "with text", "with messages", "OpenRLHF's", "verl's"):
        assert form in notes


def test_what_is_no_number_is_a_failure_of_its_response_alone() -> None:
    wrong = {
        "'0.5'": "it returned str '0.5' instead of a number or None",
        "[1]": "it returned list [1] instead of a number or None",
        "{'value': 1}": "it returned dict {'value': 1} instead of a number or None",
        "float('nan')": "it returned nan, which is not finite",
        "float('-inf')": "it returned -inf, which is not finite",
        "1 / 0": "the call raised ZeroDivisionError: division by zero",
        "exit(3)": "the call terminated its process, with code 3",
    }

    with Rewards([function("returns")], workers=1) as rewards:
        rewards.submit(episodes(*wrong, "None", "True", "__import__('numpy').float32(2)"))
        scored = rewards.results()["returns"]

    assert scored.failed == [*wrong.values(), None, None, None]
    assert scored.values == [*[None] * len(wrong), None, 1.0, 2.0]


def test_one_of_64_calls_that_hangs_costs_its_deadline_and_no_more() -> None:
    responses = ["hang" if number == 5 else "" for number in range(64)]

    with Rewards([function("by_text")], timeout_seconds=1.0) as rewards:
        began = time.monotonic()
        rewards.submit(episodes(*responses))
        submitted = time.monotonic() - began
        verdicts = rewards.results()
        seconds = time.monotonic() - began

    scored = verdicts["by_text"]
    assert submitted < 0.1
    assert seconds < 1.5
    assert scored.failed[5] == "the call took longer than 1 s"
    assert scored.num_failed == 1
    assert scored.values == [None if number == 5 else 1.0 for number in range(64)]


def test_a_worker_that_dies_or_spins_is_replaced() -> None:
    with Rewards([function("by_text")], workers=1, timeout_seconds=0.3) as rewards:
        rewards.submit(episodes("exit", "spin", "", "exit", ""))
        scored = rewards.results()["by_text"]

    died = "the call terminated its process, with code 3"
    late = "the call took longer than 0.3 s"
    assert scored == Scored([None, None, 1.0, None, 1.0], [died, late, None, died, None])


def test_what_a_killed_call_had_started_ends_with_it() -> None:
    mark = f"mark-{os.getpid()}"

    def orphans() -> list[psutil.Process]:
        return [each for each in descendants() if alive(each) and mark in each.cmdline()]

    source = function("by_text", column="answer")
    with Rewards([source], workers=1, timeout_seconds=0.5) as rewards:
        rewards.submit(episodes("orphan", answer=mark))
        assert until(lambda: bool(orphans()))
        rewards.results()

        assert until(lambda: not orphans())


KILLED = """
import os, sys, time
from tests.rewards.test_mixture import episodes, function
from rewards.mixture import Rewards
rewards = Rewards([function("by_text", column="answer")], timeout_seconds=60.0)
rewards.submit(episodes("spin", "orphan", answer=sys.argv[1]))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("victim", ["trainer", "supervisor"])
def test_nothing_outlives_a_killed_training_process_or_supervisor(victim: str) -> None:
    mark = f"mark-{os.getpid()}-{victim}"
    command = [sys.executable, "-c", KILLED, mark]
    trainer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == b"ready\n"
    below = psutil.Process(trainer.pid)

    def not_marked() -> list[psutil.Process]:
        return [each for each in below.children(recursive=True) if mark not in each.cmdline()]

    # The supervisor, two workers, and the process that one of them has started, by a program of its
    # own as soon as it has the mark.
    assert until(lambda: len(below.children(recursive=True)) == 4 and len(not_marked()) == 3)
    processes = below.children(recursive=True)

    # Without the supervisor nothing ends a process that a function detached.
    ours = not_marked()

    os.kill(trainer.pid if victim == "trainer" else processes[0].pid, signal.SIGKILL)

    checked = processes if victim == "trainer" else ours
    gone = until(lambda: not any(alive(each) for each in checked))
    for each in [*processes, psutil.Process(trainer.pid)]:
        if alive(each):
            each.kill()
    trainer.wait()
    trainer.stdout.close()
    assert gone


def test_an_edit_during_the_run_changes_nothing_and_another_file_another_fingerprint(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.py"
    source = "import os\ndef score(episodes):\n    if episodes[0].response: os._exit(1)\n"
    file.write_text(source + "    return [1.0]\n")
    config = RewardConfig(name="mine", kind="function", path=f"{file}:score")

    with Rewards([config], workers=1) as rewards:
        before = rewards.fingerprint
        file.write_text(source + "    return [2.0]\n")
        rewards.submit(episodes("end the process"))
        rewards.results()
        rewards.submit(episodes(""))
        values = rewards.results()["mine"].values
    with Rewards([config], workers=1) as again:
        after = again.fingerprint

    assert values == [1.0]
    assert before.keys() == after.keys() == {"mine"}
    assert before != after
