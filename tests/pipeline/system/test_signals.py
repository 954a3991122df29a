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

LISTENS = """
import hashlib, signal, sys
from pipeline.system.signals import ExitOnSignal, StopSignals

for name in ("SIGHUP", "SIGTERM", "SIGUSR1"):
    signal.signal(signal.Signals[name], signal.SIG_DFL)  # as in a terminal, also under nohup

def tell(number, *, aborts):
    print("aborts at" if aborts else "has heard", number.name, flush=True)

def compute_in_c():  # where Python runs no handler
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)

"""

WAITS = """
with StopSignals(tell) as signals:
    print("ready", flush=True)
    sys.stdin.readline()
print("left by", signals.received and signals.received.name)
"""


@contextmanager
def listening(program: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that has said it is ready, its signals as a terminal leaves them."""
    with subprocess.Popen(
        [sys.executable, "-c", LISTENS + program],
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
    ("numbers", "said"),
    [
        ([INT], "has heard SIGINT|left by SIGINT"),
        ([HUP], "has heard SIGHUP|left by SIGHUP"),
        ([USR1, TERM], "has heard SIGUSR1|left by SIGUSR1"),  # as SLURM ends a job
        ([TERM, TERM, TERM], "has heard SIGTERM|left by SIGTERM"),
        ([INT, HUP], "has heard SIGINT|left by SIGINT"),  # the terminal was closed as well
        ([INT, INT], "has heard SIGINT|aborts at SIGINT"),
        ([HUP, INT], "has heard SIGHUP|aborts at SIGINT"),
        ([TERM, INT], "has heard SIGTERM|aborts at SIGINT"),
        ([INT, TERM], "has heard SIGINT|aborts at SIGTERM"),  # torchrun at a second Ctrl-C
    ],
    ids=lambda value: "-".join(each.name for each in value) if isinstance(value, list) else "",
)
def test_the_first_signal_is_noted_and_a_ctrl_c_after_it_aborts(
    numbers: list[signal.Signals], said: str
) -> None:
    aborts = "aborts" in said
    with listening(WAITS) as process:
        for number in numbers:
            process.send_signal(number)
            time.sleep(LATER)
        out, _ = process.communicate("" if aborts else "\n", timeout=30)

    assert out.splitlines() == said.split("|")
    assert process.returncode == (130 if aborts else 0)


def test_signals_are_answered_at_once_while_the_main_thread_runs_no_python() -> None:
    computes = 'with StopSignals(tell):\n    print("ready", flush=True)\n    compute_in_c()\n'
    with listening(computes) as process:
        assert process.stdout is not None
        began = time.monotonic()
        process.send_signal(INT)
        assert process.stdout.readline() == "has heard SIGINT\n"
        time.sleep(LATER)
        process.send_signal(INT)

        assert process.wait(30) == 130
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("number", [TERM, USR1])
def test_where_there_is_nothing_to_save_a_scheduler_is_obeyed_at_once(
    number: signal.Signals,
) -> None:
    program = 'with ExitOnSignal():\n    print("ready", flush=True)\n    sys.stdin.readline()\n'
    with listening(program) as process:
        process.send_signal(number)

        assert process.wait(30) == EXIT_REQUEUE
