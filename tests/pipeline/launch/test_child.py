import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.launch.child import SIGNALS, Ending, run_child


@pytest.fixture(autouse=True)
def _signals_are_heard() -> Iterator[None]:
    """As in a terminal, even where the tests themselves run under nohup."""
    ignored = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


def python(program: str) -> Ending:
    return run_child([sys.executable, "-c", program], os.environ)


@pytest.mark.parametrize("code", [0, 2, 7])
def test_the_exit_code_is_the_childs(code: int) -> None:
    assert python(f"raise SystemExit({code})") == Ending(code)


def test_a_signal_that_ends_the_child_is_a_negative_code() -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"

    assert python(program) == Ending(-signal.SIGKILL)


def test_the_child_can_read_nothing() -> None:
    assert python("import sys; raise SystemExit(len(sys.stdin.read()))").code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_the_child_hears_of_an_interruption_once_and_closes_its_files(
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
    ending = python(program)

    assert ending == Ending(130, signal_received=number)
    assert closed.exists()
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_child_hears_of_a_schedulers_signal_as_it_is(
    tmp_path: Path, number: signal.Signals
) -> None:
    ready = tmp_path / "ready"
    program = f"""
import pathlib, signal, time
signal.signal({int(number)}, lambda *_: exit(75))
pathlib.Path({str(ready)!r}).touch()
time.sleep(60)
"""

    threading.Thread(target=when_exists(ready, lambda: os.kill(os.getpid(), number))).start()

    assert python(program) == Ending(75, signal_received=number)


def test_a_command_that_isnt_there_leaves_the_signals_as_they_were() -> None:
    before = signal.getsignal(signal.SIGINT)

    with pytest.raises(FileNotFoundError):
        run_child(["/no/such/program"], os.environ)

    assert signal.getsignal(signal.SIGINT) is before


def when_exists(file: Path, action: Callable[[], None]) -> Callable[[], None]:
    def wait() -> None:
        for _ in range(600):
            if file.exists():
                return action()
            time.sleep(0.05)
        return None

    return wait


@pytest.mark.jobs
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_torchrun_passes_a_schedulers_signal_on_and_waits(
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
    command = [sys.executable, "-m", "pipeline.launch.torchrun", "--standalone"]
    process = subprocess.Popen([*command, "--nproc-per-node", "2", str(script)])
    for each in ("ready0", "ready1"):
        when_exists(tmp_path / each, lambda: None)()

    process.send_signal(number)

    assert process.wait(timeout=60) == 75
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()


def test_torchrun_ends_with_the_code_of_the_process_that_failed(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text("import os, sys; sys.exit(2 if os.environ['RANK'] == '1' else 0)")
    command = [sys.executable, "-m", "pipeline.launch.torchrun", "--standalone"]

    ended = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "")


@pytest.mark.parametrize("number", ["gpu", "many"])
def test_torchrun_names_a_number_of_processes_that_the_machine_does_not_have(number: str) -> None:
    command = [sys.executable, "-m", "pipeline.launch.torchrun", "--standalone"]

    ended = subprocess.run(
        [*command, "--nproc-per-node", number, "rank.py"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 2
    assert ended.stderr == (
        f"error: --nproc-per-node {number} names no devices of this machine; give the number of"
        " processes (NUM_PROCESSES of the scripts)\n"
    )
