"""Effects of signals, in a separate process that receives them."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.system.signals import DUPLICATE_SECONDS, EXIT_REQUEUE

INT, HUP, TERM, USR1 = signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1

PRELUDE = """
import hashlib, signal, sys
from pipeline.system.signals import ExitOnSignal, StopSignals

for name in ("SIGHUP", "SIGTERM", "SIGUSR1"):
    signal.signal(signal.Signals[name], signal.SIG_DFL)  # as in a terminal, even under nohup

def report(number, *, aborts):
    print("aborts at" if aborts else "received", number.name, flush=True)

def compute_in_c():  # Python runs no handlers meanwhile
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)

"""

WAIT_PROGRAM = """
with StopSignals(report) as signals:
    print("ready", flush=True)
    sys.stdin.readline()
print("stopped by", signals.received and signals.received.name)
"""


@contextmanager
def run_program(program: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a program with a terminal's default signal handlers until it is ready."""
    with subprocess.Popen(
        [sys.executable, "-c", PRELUDE + program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


LATER = DUPLICATE_SECONDS + 0.2


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([INT], "received SIGINT|stopped by SIGINT"),
        ([HUP], "received SIGHUP|stopped by SIGHUP"),
        ([USR1, TERM], "received SIGUSR1|stopped by SIGUSR1"),  # as when SLURM ends a job
        ([TERM, TERM, TERM], "received SIGTERM|stopped by SIGTERM"),
        ([INT, HUP], "received SIGINT|stopped by SIGINT"),  # the terminal was closed as well
        ([INT, INT], "received SIGINT|aborts at SIGINT"),
        ([HUP, INT], "received SIGHUP|aborts at SIGINT"),
        ([TERM, INT], "received SIGTERM|aborts at SIGINT"),
        ([INT, TERM], "received SIGINT|aborts at SIGTERM"),  # from torchrun on a second Ctrl-C
    ],
    ids=lambda value: "-".join(number.name for number in value) if isinstance(value, list) else "",
)
def test_first_signal_stops_gracefully_and_a_second_ctrl_c_aborts(
    numbers: list[signal.Signals], expected: str
) -> None:
    aborts = "aborts" in expected
    with run_program(WAIT_PROGRAM) as process:
        for number in numbers:
            process.send_signal(number)
            time.sleep(LATER)
        out, _ = process.communicate("" if aborts else "\n", timeout=30)

    assert out.splitlines() == expected.split("|")
    assert process.returncode == (130 if aborts else 0)


def test_signals_are_handled_while_the_main_thread_runs_c_code() -> None:
    program = 'with StopSignals(report):\n    print("ready", flush=True)\n    compute_in_c()\n'
    with run_program(program) as process:
        assert process.stdout is not None
        start = time.monotonic()
        process.send_signal(INT)
        assert process.stdout.readline() == "received SIGINT\n"
        time.sleep(LATER)
        process.send_signal(INT)

        assert process.wait(30) == 130
        assert time.monotonic() - start < 10


@pytest.mark.parametrize("number", [TERM, USR1])
def test_scheduler_signal_exits_immediately_if_nothing_must_be_saved(
    number: signal.Signals,
) -> None:
    program = 'with ExitOnSignal():\n    print("ready", flush=True)\n    sys.stdin.readline()\n'
    with run_program(program) as process:
        process.send_signal(number)

        assert process.wait(30) == EXIT_REQUEUE
