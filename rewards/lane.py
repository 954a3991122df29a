"""A queue of calls and the worker processes that take them."""

import math
import subprocess
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from rewards.contract import everywhere
from rewards.messages import Answer, Call, Ready
from rewards.processes import exit_code, kill_tree, reap_orphans, start_worker
from rewards.sources import Source

LOAD_SECONDS = 120.0
"""In which a worker must have loaded the sources: what a function imports may be large."""

Take = Callable[[Answer], None]


@dataclass
class Worker:
    """A worker process and what it does."""

    process: "subprocess.Popen[bytes]"
    connection: Connection
    deadline: float
    """When it must have done what it does; infinite where it does nothing."""

    began: float = 0.0
    loaded: bool = False
    call: Call | None = None

    @property
    def is_idle(self) -> bool:
        """Whether it can take a call."""
        return self.loaded and self.call is None


class Lane:
    """Sources and the workers that score for them, each one call at a time."""

    def __init__(self, sources: Mapping[int, Source], size: int, take: Take) -> None:
        self.sources = sources
        self.queue: deque[Call] = deque()
        self.batched: dict[int, bool] = dict.fromkeys(sources, False)
        self._size = size
        self._take = take
        self._workers: list[Worker] = []

    def open(self) -> dict[int, str]:
        """Start the workers and wait for them; returns by source why it can't be loaded."""
        self._fill()
        errors: dict[int, str] = {}
        for worker in self._workers:
            ready = wait([worker.connection], max(0.0, worker.deadline - time.monotonic()))
            try:
                message: Ready = worker.connection.recv() if ready else Ready({}, self._late())
            except EOFError:
                message = Ready({}, dict.fromkeys(self.sources, "loading it ended the process"))
            self.batched |= message.batched
            errors |= message.errors
            worker.loaded, worker.deadline = True, math.inf
        return errors

    @property
    def connections(self) -> list[Connection]:
        """The connections of its workers."""
        return [worker.connection for worker in self._workers]

    @property
    def deadline(self) -> float:
        """The next one of its workers."""
        return min((worker.deadline for worker in self._workers), default=math.inf)

    def advance(self, ready: Collection[object]) -> None:
        """Receive what workers have sent, kill those past their deadline, hand out calls."""
        for worker in list(self._workers):
            # What came while another worker was replaced is no less in time.
            if worker.connection in ready or worker.connection.poll():
                self._receive(worker)
            elif time.monotonic() >= worker.deadline:
                doing = "the call" if worker.loaded else "loading the sources"
                self._lose(worker, f"{doing} took longer than {self._limit(worker):g} s")
        if self.queue:
            self._fill()
        for worker in self._workers:
            if self.queue and worker.is_idle:
                self._begin(worker, self.queue.popleft())

    def _receive(self, worker: Worker) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            code = exit_code(worker.process)
            self._lose(worker, f"the call ended its process, with code {code}")
            return
        worker.deadline = math.inf
        if isinstance(message, Ready):
            worker.loaded = True
        else:
            worker.call = None
            self._take(message)

    def _begin(self, worker: Worker, call: Call) -> None:
        seconds = self.sources[call.source].call_seconds(len(call.episodes))
        worker.began = time.monotonic()
        worker.call, worker.deadline = call, worker.began + seconds
        try:
            worker.connection.send(call)
        except OSError:
            self._lose(worker, f"the process had ended, with code {exit_code(worker.process)}")

    def _lose(self, worker: Worker, sentence: str) -> None:
        """Be rid of a worker; its call has failed."""
        kill_tree(worker.process.pid)
        worker.process.wait()
        worker.connection.close()
        self._workers.remove(worker)
        reap_orphans({each.process.pid for each in self._workers})
        if worker.call is not None:
            seconds = time.monotonic() - worker.began
            self._fail(worker.call, sentence, seconds)
        if worker.loaded:
            self._fill()
            return
        # Another worker would go the same way: it is tried when there is a call, and where nobody
        # is left to take those that wait, they have failed.
        while self.queue and not self._workers:
            self._fail(self.queue.popleft(), f"its worker can't be started: {sentence}", 0.0)

    def _fail(self, call: Call, sentence: str, seconds: float) -> None:
        outcomes = everywhere(sentence, len(call.episodes))
        self._take(Answer(call.number, outcomes, seconds))

    def _limit(self, worker: Worker) -> float:
        if worker.call is None:
            return LOAD_SECONDS
        return self.sources[worker.call.source].call_seconds(len(worker.call.episodes))

    def _late(self) -> dict[int, str]:
        return dict.fromkeys(self.sources, f"loading it took longer than {LOAD_SECONDS:g} s")

    def _fill(self) -> None:
        while len(self._workers) < self._size:
            self._workers.append(_started(self.sources))


def _started(sources: Mapping[int, Source]) -> Worker:
    process, connection = start_worker("rewards.worker", dict(sources))
    return Worker(process, connection, time.monotonic() + LOAD_SECONDS)
