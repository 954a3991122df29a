"""Processes that end with the one that started them, and their descendants with them."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import FrameType

import psutil

from pipeline.signals import INTERRUPTS, STOP_SIGNALS

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def end_with_parent(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel end this process when the thread that started it ends, on Linux.

    Elsewhere, and where the parent's parent ends first, the end of the pipe between them tells.

    Args:
        parent: pid of the process that started this one, which may have ended by now.
        how: the signal to end it with.
    """
    _prctl(_PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:
        os._exit(1)


def leave_signals_to(parent: int) -> None:
    """Have Ctrl-C and a scheduler's signals change nothing while the parent lives.

    They may reach every process of a job; it is the training process that stops, after its step,
    for which it needs its rewards. Afterwards each ends this process and its descendants. Handlers,
    unlike ignored signals, are not inherited by what a function starts.
    """

    def heed(_number: int, _frame: FrameType | None) -> None:
        if os.getppid() != parent:
            # Nothing is raised: it could interrupt the same work at its end.
            kill_children()
            os._exit(1)

    for number in (*STOP_SIGNALS, *INTERRUPTS):
        signal.signal(number, heed)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends, so that `kill_children` finds them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def start_worker(module: str, first: object) -> "tuple[subprocess.Popen[bytes], Connection]":
    """Start `python -m MODULE FD PARENT` with a pipe to it, on which it first finds `first`."""
    ours, theirs = Pipe()
    arguments = [str(theirs.fileno()), str(os.getpid())]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    with contextlib.suppress(OSError):  # it has ended, which its connection tells as well
        ours.send(first)
    return process, ours


def exit_code(process: "subprocess.Popen[bytes]") -> int | None:
    """The code of a process that ends; None where it does not within a second."""
    try:
        return process.wait(1.0)
    except subprocess.TimeoutExpired:
        return None


def kill_tree(pid: int) -> None:
    """Kill a process, its group and its descendants, whatever sessions they made for themselves."""
    try:
        process = psutil.Process(pid)
        below = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        _kill(process)
    for each in below:
        _kill(each)


def kill_descendants(pid: int) -> None:
    """Kill what a process and its children have started, and not itself."""
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for each in below:
        _kill(each)


def kill_children() -> None:
    """Kill all descendants of this process and wait for them, 5 seconds at most."""
    deadline = time.monotonic() + 5.0
    own = psutil.Process()
    while (below := own.children(recursive=True)) and time.monotonic() < deadline:
        for each in below:
            _kill(each)
        for each in below:
            _reap(each.pid)
        time.sleep(0.005)


def reap_orphans(known: set[int]) -> None:
    """Wait for adopted children that have ended; `known` are waited for by others."""
    for each in psutil.Process().children():
        if each.pid not in known:
            _reap(each.pid)


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.Error:
        return


def _reap(pid: int) -> None:
    """Wait for a child that has ended; for one that has not, or is none of ours, do nothing."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
