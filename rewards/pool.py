"""The training process's end of the reward workers."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from pipeline.errors import ConfigError
from pipeline.installation import ROOT
from rewards.contract import Episode, RewardError
from rewards.messages import Collect, Collected, Opened, Setup, Submission
from rewards.processes import kill_tree
from rewards.sources import Source

CLOSE_SECONDS = 10.0
"""Time in which the supervisor must end its descendants when it is asked to end."""


class Pool:
    """Worker processes that score while this process goes on.

    Raises:
        ConfigError: a source can't be loaded.
    """

    def __init__(self, sources: Sequence[Source], *, workers: int) -> None:
        self._connection, theirs = Pipe()
        self._process = _supervisor(theirs)
        theirs.close()
        try:
            self._send(Setup(list(sources), workers))
            opened = self._receive()
        except BaseException:
            self.close()
            raise
        assert isinstance(opened, Opened)
        for name, text in opened.errors.items():
            self.close()
            raise ConfigError(f"rewards.{name} can't be loaded: {' '.join(text.split())}")

    def submit(self, episodes: Sequence[Episode]) -> None:
        """Have every source score the episodes; returns at once."""
        self._send(Submission(list(episodes)))

    def collect(self) -> Collected:
        """Wait for the outcomes of all that was submitted since the last call."""
        self._send(Collect())
        collected = self._receive()
        assert isinstance(collected, Collected)
        return collected

    def close(self) -> None:
        """End all processes."""
        self._connection.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            kill_tree(self._process.pid)
            self._process.wait()

    def _send(self, message: Setup | Submission | Collect) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise self._lost() from None

    def _receive(self) -> Opened | Collected:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            raise self._lost() from None

    def _lost(self) -> RewardError:
        code = self._process.poll()
        return RewardError(
            f"the process that keeps the reward workers has ended (code {code}); look for a lack"
            " of memory, and start again with --resume"
        )


def _supervisor(connection: Connection) -> "subprocess.Popen[bytes]":
    # The kernel ties a child to the thread that started it, and only the main one lives as long.
    ends_with_thread = threading.current_thread() is threading.main_thread()
    arguments = [connection.fileno(), os.getpid(), int(ends_with_thread)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    environment.setdefault("OMP_NUM_THREADS", "1")
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "rewards.supervisor", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        pass_fds=[connection.fileno()],
        # Ctrl-C is for the training process, which needs its rewards to finish its step.
        start_new_session=True,
        env=environment,
    )
