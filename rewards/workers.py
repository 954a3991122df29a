"""Worker processes that run users' code: reward functions, verifiers, judges and environments.

The training process starts one supervisor and sends it calls. The supervisor starts the workers,
kills one whose call exceeds its deadline, restarts one that died, and exits with all its
descendants when the training process exits for any reason. As a separate process it enforces
deadlines while the training process computes. Requests and replies are pickled at both ends and
pass through the supervisor as bytes.
"""

import contextlib
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

import psutil

from pipeline.system.errors import ConfigError, UserError
from pipeline.system.installation import ROOT
from pipeline.system.signals import INTERRUPTS, STOP_SIGNALS

LOAD_SECONDS = 120.0
"""Seconds within which a worker must load its code, whose imports may be slow."""

CLOSE_SECONDS = 10.0
"""Seconds within which the supervisor must kill its descendants after it is closed."""


class RewardError(UserError):
    """A reward source failed on more responses than the settings allow, or can't run."""


RestartDeadline = Callable[[], None]
"""Restarts the deadline of the current call."""

Handler = Callable[[Any, RestartDeadline], Any]
"""Returns the reply to a request."""


@dataclass(frozen=True)
class WorkerGroup:
    """Workers that take calls from one queue, each running one call at a time."""

    name: str
    """Name of the code that the workers run, for messages."""

    load: Callable[[], Handler]
    """Runs in each worker when it starts; must be picklable."""

    size: int = 1
    """Number of workers."""


@dataclass(frozen=True)
class CallReply:
    """Result of a call: a value or a failure."""

    call_id: int
    value: Any = None
    failure: str | None = None


@dataclass(frozen=True)
class _Call:
    call_id: int
    group: int
    name: str
    seconds: float
    """Time until the deadline."""

    request: bytes


class Workers:
    """Worker processes, as seen by the training process.

    Args:
        groups: the workers to start.

    Raises:
        ConfigError: the code of a group can't be loaded.
    """

    def __init__(self, groups: Sequence[WorkerGroup]) -> None:
        self._num_calls = 0
        self._connection, remote = Pipe()
        self._process = _start_supervisor(remote)
        remote.close()
        try:
            self._send([(group.name, pickle.dumps(group.load), group.size) for group in groups])
            error: str | None = self._receive()
        except BaseException:
            self.close()
            raise
        if error is not None:
            self.close()
            raise ConfigError(" ".join(error.split()))

    def submit(
        self, request: object, *, group: int = 0, seconds: float, name: str = "the call"
    ) -> int:
        """Queue a call and return its id.

        Args:
            request: passed to the group's handler.
            group: index of the group.
            seconds: time limit of the call.
            name: name of the call, for messages.

        Raises:
            RewardError: the supervisor has exited.
        """
        self._num_calls += 1
        self._send(_Call(self._num_calls, group, name, seconds, pickle.dumps(request)))
        return self._num_calls

    def receive(self, *, wait: bool) -> list[CallReply]:
        """Return the replies received since the last call; with `wait`, block until there is one.

        Raises:
            RewardError: the supervisor has exited.
        """
        replies: list[CallReply] = []
        while (wait and not replies) or self._connection.poll():
            call_id, value, failure = self._receive()
            result = None if value is None else pickle.loads(value)  # noqa: S301 - own worker
            replies.append(CallReply(call_id, result, failure))
        return replies

    def close(self) -> None:
        """Stop all processes."""
        self._connection.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            kill_tree(self._process.pid)
            self._process.wait()

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise self._supervisor_exited() from None

    def _receive(self) -> Any:  # noqa: ANN401
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            raise self._supervisor_exited() from None

    def _supervisor_exited(self) -> RewardError:
        return RewardError(
            f"the supervisor of the reward workers has exited (code {self._process.poll()}); check"
            " whether memory ran out, and restart with --resume"
        )


def _start_supervisor(connection: Connection) -> "subprocess.Popen[bytes]":
    # PR_SET_PDEATHSIG fires when the parent thread exits; only the main thread lives as long as the
    # process.
    dies_with_thread = threading.current_thread() is threading.main_thread()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
    return _start_python("supervise", connection, int(dies_with_thread), environment=environment)


def _start_python(
    function: str,
    connection: Connection,
    *arguments: int,
    environment: dict[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Run a function of this module in a new process, which gets one end of a pipe."""
    # Not `python -m`, which would define this module's classes twice.
    code = f"from rewards import workers; workers.{function}()"
    argv = map(str, (connection.fileno(), os.getpid(), *arguments))
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, *argv],
        stdin=subprocess.DEVNULL,
        pass_fds=[connection.fileno()],
        # Ctrl-C must reach only the training process, which needs rewards to finish its step.
        start_new_session=True,
        env=environment,
    )


def supervise() -> None:
    """Run calls for the training process until it closes its end of the pipe."""
    descriptor, parent, dies_with_thread = map(int, sys.argv[1:])
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _defer_signals_to(parent)
    if dies_with_thread:
        # SIGKILL would orphan the processes that the workers started.
        _die_with_parent(parent, signal.SIGTERM)
    try:
        with contextlib.suppress(EOFError, OSError):  # the training process has exited
            _serve(Connection(descriptor))
    finally:
        _SPAWN_LOCK.acquire()
        _kill_children()
        os._exit(0)


_Result = tuple[int, bytes | None, str | None]
"""Id, pickled value and failure of a call."""


def _serve(trainer: Connection) -> None:
    loaded: SimpleQueue[str | None] = SimpleQueue()
    results: SimpleQueue[_Result] = SimpleQueue()
    queues: list[SimpleQueue[_Call]] = []
    workers: list[_Worker] = []
    for name, load, size in trainer.recv():
        queues.append(SimpleQueue())
        workers += [_Worker(name, load, queues[-1], loaded, results) for _ in range(size)]
    for worker in workers:
        threading.Thread(target=worker.run, daemon=True).start()
    trainer.send(next(filter(None, [loaded.get() for _ in workers]), None))

    def send_results() -> None:
        with contextlib.suppress(OSError):  # the pipe is closed, which ends the main thread too
            while True:
                trainer.send(results.get())

    # The main thread only receives, so that the training process never blocks in send.
    threading.Thread(target=send_results, daemon=True).start()
    while True:
        call: _Call = trainer.recv()
        queues[call.group].put(call)


_SPAWN_LOCK = threading.Lock()
"""Held while starting a worker, while reaping adopted processes, and during the final cleanup."""

_WORKER_PIDS: set[int] = set()
"""PIDs of the workers, for which their own threads wait."""


@dataclass
class _Worker:
    """A worker process as seen by the supervisor: `run` sends it calls, in a separate thread."""

    name: str
    load: bytes
    calls: "SimpleQueue[_Call]"
    loaded: "SimpleQueue[str | None]"
    results: "SimpleQueue[_Result]"
    process: "subprocess.Popen[bytes] | None" = None

    def run(self) -> None:
        """Start the worker, then run calls until the supervisor exits."""
        self.loaded.put(self._start())
        while True:
            call = self.calls.get()
            error = self._start() if self.process is None else None
            if error is not None:
                self._fail_all(call, f"its worker can't be started: {error}")
                continue
            result = self._exchange(call.request, call.seconds, name=call.name)
            self.results.put((call.call_id, *result))
            if self.process is None:
                self._start()  # restart before taking a call that another worker could run now

    def _fail_all(self, call: _Call, failure: str) -> None:
        """Fail a call and all queued ones, since another worker would also fail to start."""
        with contextlib.suppress(Empty):
            while True:
                self.results.put((call.call_id, None, failure))
                call = self.calls.get_nowait()

    def _start(self) -> str | None:
        """Start the worker; return the reason if its code can't be loaded."""
        self._connection, remote = Pipe()
        with _SPAWN_LOCK:
            self.process = _start_python("work", remote)
            _WORKER_PIDS.add(self.process.pid)
        remote.close()
        _, failure = self._exchange(self.load, LOAD_SECONDS, name=f"loading {self.name}")
        if failure is not None:
            self._stop()
        return failure

    def _exchange(
        self, request: bytes, seconds: float, *, name: str
    ) -> tuple[bytes | None, str | None]:
        """Send a request and return its value or failure; kill a worker that returns neither."""
        assert self.process is not None
        connection = self._connection
        try:
            connection.send((name, request))
            deadline = time.monotonic() + seconds
            while connection.poll(max(0.0, deadline - time.monotonic())):
                result = connection.recv()
                if result is not None:
                    return result
                deadline = time.monotonic() + seconds
            failure = f"{name} took longer than {seconds:g} s"
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
            failure = f"{name} terminated its process with exit code {self.process.returncode}"
        self._stop()
        return None, failure

    def _stop(self) -> None:
        """Kill the worker and its descendants."""
        if self.process is None:
            return
        kill_tree(self.process.pid)
        self.process.wait()
        self._connection.close()
        with _SPAWN_LOCK:
            _WORKER_PIDS.discard(self.process.pid)
            for child in psutil.Process().children():
                if child.pid not in _WORKER_PIDS:
                    _reap(child.pid)
        self.process = None


def work() -> None:
    """Run calls from the supervisor on the main thread, after loading the code."""
    descriptor, parent = map(int, sys.argv[1:])
    _die_with_parent(parent, signal.SIGKILL)
    _defer_signals_to(parent)
    os.dup2(2, 1)  # keep prints of user code out of the command's output
    connection = Connection(descriptor)
    handler: Handler | None = None
    with contextlib.suppress(EOFError):
        while True:
            name, request = connection.recv()
            try:
                payload = pickle.loads(request)  # noqa: S301 - from the training process
                if handler is None:
                    handler, value = payload(), None
                else:
                    value = handler(payload, lambda: connection.send(None))
                result = pickle.dumps(value), None
            except UserError as error:
                result = None, str(error)
            except Exception as error:  # noqa: BLE001 - whatever a user's code raises
                result = None, f"{name} raised {type(error).__name__}: {error}"
            if os.getppid() != parent:  # a process forked by the user's code
                os._exit(0)
            connection.send(result)


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h; the second makes a process the parent of its orphaned descendants."""


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_parent(parent: int, signum: signal.Signals) -> None:
    """Make the kernel signal this process when the thread that started it exits.

    This works only on Linux; elsewhere, the process exits when the pipe to its parent closes.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(1)


def _defer_signals_to(parent: int) -> None:
    """On Ctrl-C or a scheduler's signal, kill the process tree unless the parent is alive.

    These signals may reach every process of a job. The training process first finishes its step,
    for which it needs the rewards. Handlers, unlike ignored signals, are not inherited by children.
    """

    def handle(_number: int, _frame: FrameType | None) -> None:
        if os.getppid() != parent:
            # An exception could interrupt the cleanup itself.
            _kill_children()
            os._exit(1)

    for number in (*STOP_SIGNALS, *INTERRUPTS):
        signal.signal(number, handle)


def kill_tree(pid: int, *, include_self: bool = True) -> None:
    """Kill a process, its group and its descendants in any session, or only the descendants.

    Args:
        pid: id of the process.
        include_self: whether to kill the process and its group.
    """
    try:
        process = psutil.Process(pid)
        descendants = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    if include_self:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        descendants.append(process)
    for descendant in descendants:
        with contextlib.suppress(psutil.Error):
            descendant.kill()


def _kill_children() -> None:
    """Kill all descendants of this process and wait for them, for at most 5 seconds."""
    deadline = time.monotonic() + 5.0
    process = psutil.Process()
    while (descendants := process.children(recursive=True)) and time.monotonic() < deadline:
        kill_tree(process.pid, include_self=False)
        for descendant in descendants:
            _reap(descendant.pid)
        time.sleep(0.005)


def _reap(pid: int) -> None:
    """Wait for a child that has exited; do nothing if it is running or is not a child."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
