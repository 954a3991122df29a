"""The training process's end of a supervisor, which keeps worker processes for it."""

import os
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from pipeline.installation import ROOT
from rewards.contract import RewardError
from rewards.processes import kill_tree

CLOSE_SECONDS = 10.0
"""Time in which the supervisor must end its descendants when it is asked to end."""


class Link:
    """A supervisor that was started for this process, and the pipe to it."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._process = _supervisor(theirs)
        theirs.close()

    def send(self, message: object) -> None:
        """Send a message, without waiting for a reply.

        Raises:
            RewardError: the supervisor has ended.
        """
        try:
            self._connection.send(message)
        except OSError:
            raise self._lost() from None

    def receive(self) -> Any:  # noqa: ANN401
        """Wait for a message.

        Raises:
            RewardError: the supervisor has ended.
        """
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            raise self._lost() from None

    def has_message(self, seconds: float) -> bool:
        """Whether there is one, or the supervisor has ended; waits so long for it."""
        return self._connection.poll(seconds)

    def close(self) -> None:
        """End all processes."""
        self._connection.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            kill_tree(self._process.pid)
            self._process.wait()

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
