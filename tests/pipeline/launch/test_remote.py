"""Several commands as those of several machines; each runs here, through what stands for ssh."""

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

RUNS = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
from pipeline.launch.remote import Errand, run_everywhere

node = [sys.executable, "-m", "pipeline.launch.node", sys.executable, "-c"]
errands = [
    Errand(f"worker-{number}", command, {"NUMBER": str(number)})
    for number, program in enumerate(PROGRAMS)
    for command in [program if isinstance(program, list) else [*node, program]]
]
sys.exit(run_everywhere(errands, fewest=FEWEST))
"""


def start(*programs: str | list[str], fewest: int | None = None) -> "subprocess.Popen[str]":
    """Run programs side by side; a list is a command of its own instead of one on a machine."""
    program = f"PROGRAMS = {[_dedented(each) for each in programs]!r}\nFEWEST = {fewest!r}\n{RUNS}"
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _dedented(program: str | list[str]) -> str | list[str]:
    return textwrap.dedent(program) if isinstance(program, str) else program


def run(*programs: str | list[str], fewest: int | None = None) -> tuple[int, str, str]:
    process = start(*programs, fewest=fewest)
    out, errors = process.communicate(timeout=60)
    return process.returncode, out, errors


ENDS_WELL = "print('fine')"
WAITS = "import time; time.sleep(60)"
FAILS = "import sys; print('Traceback', file=sys.stderr); sys.exit(3)"


def test_what_each_writes_comes_after_its_name_and_where_it_belongs() -> None:
    shows = """
        import os, sys
        print("I am", os.environ["NUMBER"])
        print("and complain", file=sys.stderr)
        sys.stdout.write("half a line")
    """

    code, out, errors = run(shows, shows)

    assert code == 0
    assert sorted(out.splitlines()) == [
        *("worker-0: I am 0", "worker-0: half a line"),
        *("worker-1: I am 1", "worker-1: half a line"),
    ]
    assert sorted(errors.splitlines()) == ["worker-0: and complain", "worker-1: and complain"]


def test_one_machine_alone_needs_no_name() -> None:
    assert run(ENDS_WELL) == (0, "fine\n", "")


def test_the_first_that_fails_is_named_and_ends_the_others() -> None:
    ends_itself = """
        import time
        time.sleep(1)
        raise SystemExit(1)
    """

    code, _, errors = run(ends_itself, FAILS)

    assert code == 3
    assert errors.splitlines() == [
        "worker-1: Traceback",
        "worker-1 ended first, with exit code 3; the others are stopped",
    ]


def test_who_is_killed_is_named_with_the_signal() -> None:
    code, _, errors = run("import os; os.kill(os.getpid(), 9)", ENDS_WELL)

    assert code == 137
    assert errors.splitlines()[-1].startswith("worker-0 ended first, by SIGKILL")


def test_wrong_input_has_said_what_is_wrong_itself() -> None:
    wrong = "import sys; print('error: no such file', file=sys.stderr); sys.exit(2)"

    assert run(wrong) == (2, "", "error: no such file\n")


def test_a_connection_that_is_lost_is_no_exit_code_of_a_step() -> None:
    lost = ["sh", "-c", "read line; echo 'Connection to worker-1 closed' >&2; exit 255"]

    code, _, errors = run("raise SystemExit(0)", lost)

    assert code == 1
    assert errors.splitlines()[-1].startswith("worker-1: the connection failed or was lost")


def test_the_others_go_on_while_enough_are_left() -> None:
    code, out, errors = run("import time; time.sleep(2); print('done')", FAILS, fewest=1)

    assert (code, out) == (0, "worker-0: done\n")
    assert errors.splitlines()[-1] == "worker-1 ended first, with exit code 3; 1 of 2 go on"


@pytest.mark.jobs
def test_without_the_first_one_nothing_goes_on() -> None:
    code, _, errors = run(FAILS, WAITS, fewest=1)

    assert code == 3
    assert "go on" not in errors


@pytest.mark.parametrize(
    ("number", "heard"),
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGUSR1, signal.SIGUSR1),
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGHUP, signal.SIGINT),
    ],
)
def test_signals_reach_every_machine(number: signal.Signals, heard: signal.Signals) -> None:
    saves = f"""
        import signal, sys, time
        def leave(*_):
            print("saved", flush=True)
            sys.exit(75)
        signal.signal({int(heard)}, leave)
        print("ready", flush=True)
        time.sleep(60)
    """
    process = start(saves, saves)
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline().endswith("ready\n")

    process.send_signal(number)
    out, _ = process.communicate(timeout=60)

    assert process.returncode == 75
    assert sorted(out.splitlines()) == ["worker-0: saved", "worker-1: saved"]


def test_no_machine_works_on_when_the_launcher_is_killed(tmp_path: Path) -> None:
    works = f"""
        import pathlib, time, os
        file = pathlib.Path({str(tmp_path)!r}, os.environ["NUMBER"])
        file.touch()
        print("ready", flush=True)
        while True:
            time.sleep(0.05)
            file.touch()
    """
    process = start(works, works)
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()

    process.kill()
    process.communicate()

    def is_touched() -> bool:
        before = [file.stat().st_mtime_ns for file in sorted(tmp_path.iterdir())]
        time.sleep(0.3)
        return before != [file.stat().st_mtime_ns for file in sorted(tmp_path.iterdir())]

    end = time.monotonic() + 20
    while is_touched():
        assert time.monotonic() < end
    assert len(list(tmp_path.iterdir())) == 2
