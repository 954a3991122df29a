"""Child processes on this machine, of torchrun, and on other machines."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pipeline.launch.child import SIGNALS, ExitStatus, run_child
from pipeline.launch.torchrun import own_address, select_exit_code, use_route_to_first_node

ROOT = Path(__file__).parents[3]
NODE = [sys.executable, "-m", "pipeline.launch.remote", sys.executable, "-c"]
TORCHRUN = [sys.executable, "-m", "pipeline.launch.torchrun", "--standalone"]


@pytest.fixture(autouse=True)
def _restore_signal_handlers() -> Iterator[None]:
    """Use a terminal's default handlers, even if the tests run under nohup."""
    ignored = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_child_receives_an_interruption_once_and_can_clean_up(
    tmp_path: Path, number: signal.Signals
) -> None:
    ready, closed = tmp_path / "ready", tmp_path / "closed"
    program = f"""
import pathlib, time
try:
    pathlib.Path({str(ready)!r}).touch()
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.3)
    pathlib.Path({str(closed)!r}).touch()
    raise SystemExit(130)
"""
    before = signal.getsignal(number)

    threading.Thread(target=when_exists(ready, lambda: os.kill(os.getpid(), number))).start()
    result = run_child([sys.executable, "-c", program], os.environ)

    assert result == ExitStatus(130, signal_received=number)
    assert closed.exists()
    assert signal.getsignal(number) is before


def when_exists(file: Path, action: Callable[[], None]) -> Callable[[], None]:
    def wait() -> None:
        for _ in range(600):
            if file.exists():
                return action()
            time.sleep(0.05)
        return None

    return wait


@pytest.mark.jobs
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.faults)]
)
def test_torchrun_forwards_scheduler_signals_and_waits(
    tmp_path: Path, number: signal.Signals
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(f"""
import os, pathlib, signal, time
def leave(*_):
    time.sleep(0.5)
    pathlib.Path({str(tmp_path)!r}, "saved" + os.environ["RANK"]).touch()
    os._exit(75)
signal.signal({int(number)}, leave)
pathlib.Path({str(tmp_path)!r}, "ready" + os.environ["RANK"]).touch()
time.sleep(60)
""")
    process = subprocess.Popen([*TORCHRUN, "--nproc-per-node", "2", str(script)])
    for name in ("ready0", "ready1"):
        when_exists(tmp_path / name, lambda: None)()

    process.send_signal(number)

    assert process.wait(timeout=60) == 75
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()


@pytest.mark.parametrize(
    ("first", "nnodes", "other"), [("[::1]", "1", "::1"), ("localhost", "1:2", "192.0.2.1")]
)
def test_machine_registers_an_address_that_others_reach(
    monkeypatch: pytest.MonkeyPatch, first: str, nnodes: str, other: str
) -> None:
    if (address := own_address(other)) is None:
        pytest.skip("this machine has no IPv6, or no default route")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    options = Namespace(rdzv_endpoint=f"{first}:29400", local_addr=None, nnodes=nnodes)
    use_route_to_first_node(options)
    assert options.local_addr == address


@contextmanager
def start_remote(program: str) -> Iterator[subprocess.Popen[str]]:
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


def write_line(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_variables_are_passed_by_stdin_and_not_on_a_command_line() -> None:
    program = "import os; print(os.environ['HF_TOKEN'], flush=True); import time; time.sleep(60)"
    with start_remote(program) as process:
        write_line(process, json.dumps({"HF_TOKEN": "hf_secret"}))

        assert read_line(process) == "hf_secret"
        node = psutil.Process(process.pid)
        lines = [x.cmdline() for x in (node, *node.children())]
        assert not [line for line in lines if "hf_secret" in " ".join(line)]


def test_processes_end_when_the_launcher_is_gone() -> None:
    program = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], process_group=0)
print(child.pid, flush=True)
time.sleep(60)
"""
    with start_remote(program) as process:
        write_line(process, "{}")
        grandchild = psutil.Process(int(read_line(process)))
        assert process.stdin is not None
        process.stdin.close()

        assert process.wait(30) == 128 + signal.SIGTERM
        psutil.wait_procs([grandchild], timeout=10)
        assert not grandchild.is_running()


RUN_ON_HOSTS = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
from pipeline.launch.remote import RemoteCommand, run_on_all_hosts

node = [sys.executable, "-m", "pipeline.launch.remote", sys.executable, "-c"]
remotes = [
    RemoteCommand(f"worker-{number}", [*node, program], {"NUMBER": str(number)})
    for number, program in enumerate(PROGRAMS)
]
sys.exit(run_on_all_hosts(remotes))
"""


def start(*programs: str) -> "subprocess.Popen[str]":
    """Run programs concurrently."""
    program = f"PROGRAMS = {[*map(textwrap.dedent, programs)]!r}\n{RUN_ON_HOSTS}"
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(*programs: str) -> tuple[int, str, str]:
    process = start(*programs)
    out, errors = process.communicate(timeout=60)
    return process.returncode, out, errors


FAILS = "import sys; print('Traceback', file=sys.stderr); sys.exit(3)"


def test_first_failed_host_is_reported_and_ends_the_others() -> None:
    fails_later = """
        import time
        time.sleep(1)
        raise SystemExit(1)
    """

    code, _, errors = run(fails_later, FAILS)

    assert code == 3
    assert errors.splitlines() == [
        "worker-1: Traceback",
        "worker-1 exited first, with exit code 3; stopping the others",
    ]


@pytest.mark.parametrize(
    ("number", "received"),
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGUSR1, signal.SIGUSR1),
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGHUP, signal.SIGINT),
    ],
)
def test_signals_reach_every_machine(number: signal.Signals, received: signal.Signals) -> None:
    program = f"""
        import signal, sys, time
        def leave(*_):
            print("saved", flush=True)
            sys.exit(75)
        signal.signal({int(received)}, leave)
        print("ready", flush=True)
        time.sleep(60)
    """
    process = start(program, program)
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline().endswith("ready\n")

    process.send_signal(number)
    out, _ = process.communicate(timeout=60)

    assert process.returncode == 75
    assert sorted(out.splitlines()) == ["worker-0: saved", "worker-1: saved"]


@pytest.mark.parametrize(
    ("codes", "expected"), [([2, 2], 2), ([-15, 2], 2), ([1, -9], 137), ([-15, -15], 143)]
)
def test_exit_code_is_that_of_the_first_failed_process(codes: list[int], expected: int) -> None:
    assert select_exit_code(codes) == expected
