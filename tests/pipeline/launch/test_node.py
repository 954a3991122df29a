"""The command on a machine, told by a launcher through its standard input."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from pipeline.launch import node

NODE = [sys.executable, "-m", "pipeline.launch.node", sys.executable, "-c"]


@contextmanager
def told(program: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*NODE, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_variables_come_through_standard_input_and_not_on_a_command_line() -> None:
    shows = "import os; print(os.environ['HF_TOKEN'], flush=True); import time; time.sleep(60)"
    with told(shows) as process:
        say(process, json.dumps({"HF_TOKEN": "hf_secret"}))

        assert hear(process) == "hf_secret"
        of_node = psutil.Process(process.pid)
        lines = [each.cmdline() for each in (of_node, *of_node.children())]
        assert not [line for line in lines if "hf_secret" in " ".join(line)]


@pytest.mark.parametrize("code", [0, 2, 79])
def test_the_exit_code_is_the_commands(code: int) -> None:
    with told(f"raise SystemExit({code})") as process:
        say(process, "{}")

        assert process.wait(30) == code


def test_a_signal_that_ends_the_command_is_128_and_its_number() -> None:
    with told("import os; os.kill(os.getpid(), 9)") as process:
        say(process, "{}")

        assert process.wait(30) == 137


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_passed_on_by_name(number: signal.Signals) -> None:
    waits = f"""
import signal, time
signal.signal({int(number)}, lambda *_: exit(75))
print("ready", flush=True)
time.sleep(60)
"""
    with told(waits) as process:
        say(process, "{}")
        say(process, "")
        assert hear(process) == "ready"
        say(process, number.name)

        assert process.wait(30) == 75


def test_nothing_stays_behind_when_the_launcher_is_gone() -> None:
    starts = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0)
print(child.pid, flush=True)
time.sleep(60)
"""
    with told(starts) as process:
        say(process, "{}")
        grandchild = psutil.Process(int(hear(process)))
        assert process.stdin is not None
        process.stdin.close()

        assert process.wait(30) == 128 + signal.SIGTERM
        psutil.wait_procs([grandchild], timeout=10)
        assert not grandchild.is_running()


def test_a_launcher_that_says_nothing_counts_as_gone() -> None:
    read, write = os.pipe()
    os.write(write, b"{}\n")
    stdin = os.dup(0)
    os.dup2(read, 0)
    try:
        began = time.monotonic()
        code = node.main([sys.executable, "-c", "import time; time.sleep(60)"], lost_seconds=0.5)
    finally:
        os.dup2(stdin, 0)
        for each in (read, write, stdin):
            os.close(each)

    assert code == 128 + signal.SIGTERM
    assert time.monotonic() - began < 20
