"""One job at a time."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.files.lock import RunLock
from pipeline.system.errors import ConfigError
from tests.sources import ROOT

HOLDER = """
import os, sys, time
from pathlib import Path
from pipeline.files.lock import RunLock
with RunLock(Path(sys.argv[1])):
    if len(sys.argv) > 2 and os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(60)
    elif len(sys.argv) == 2:
        print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def holder(path: Path, *arguments: str) -> Iterator[tuple[int, str]]:
    """Run a process that holds the lock; yield its id and its first line of output."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.pid, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_second_job_raises_with_the_process_that_holds_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "out" / "lock"

    with holder(path) as (pid, _), pytest.raises(ConfigError) as error, RunLock(path):
        pass

    message = str(error.value)
    since = json.loads(path.read_text())["since"]
    assert message == (
        f"{path.parent} is in use by process {pid} on {socket.gethostname()} since {since};"
        " wait for it, stop it, or choose another directory"
    )


def test_lock_of_a_killed_job_is_released_although_its_child_lives(tmp_path: Path) -> None:
    with holder(tmp_path / "lock", "fork") as (pid, child):
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

        with RunLock(tmp_path / "lock"):
            os.kill(int(child), 0)  # is alive
            assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
        os.kill(int(child), signal.SIGKILL)
