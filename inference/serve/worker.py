"""The generation thread, which owns the models and their batches.

Other threads use `submit`, `cancel` and `call`; results go to the event loop, once for each step.
"""

import asyncio
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from inference.engine.requests import Ended, Request, Ticket, Token
from inference.serve.jobs import Job, Piece, Row, Wanted
from inference.serve.metrics import Metrics
from inference.serve.served import Lane, ServedModel
from pipeline.errors import DataError

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items of clients; of each client oldest first, and of the clients one after the other."""

    def __init__(self) -> None:
        self._items: OrderedDict[Hashable, deque[T]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        for items in self._items.values():
            yield from items

    def add(self, client: Hashable, item: T) -> None:
        """Come last of this client's."""
        self._items.setdefault(client, deque()).append(item)
        self._count += 1

    def take(self) -> T:
        """The oldest item of the client whose turn it is, who then comes last."""
        client, items = next(iter(self._items.items()))
        item = items.popleft()
        self._count -= 1
        if items:
            self._items.move_to_end(client)
        else:
            del self._items[client]
        return item

    def remove(self, client: Hashable, item: T) -> bool:
        """Take an item out, wherever it is; False where it isn't there."""
        items = self._items.get(client, deque())
        if item not in items:
            return False
        items.remove(item)
        self._count -= 1
        if not items:
            del self._items[client]
        return True


logger = logging.getLogger(__name__)


Prompt = tuple[Job, int]
"""A job and the number of one of its prompts."""


@dataclass
class Progress:
    """How far a job is."""

    left: int
    """Responses that have not ended."""
    tickets: set[Ticket] = field(default_factory=set)
    """Those that have a slot, or wait for one in the batch."""


class Worker:
    """Runs the batches of all models, one step of each after the other.

    Args:
        models: by name.
        deliver: called on the event loop with the pieces of a step.
        failed: called on the event loop when the thread has died.
        metrics: of the server.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        *,
        deliver: Callable[[list[tuple[Job, Piece]]], None],
        failed: Callable[[BaseException], None],
        metrics: Metrics,
    ) -> None:
        self._models = models
        self._deliver, self._failed = deliver, failed
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._submitted: deque[Job] = deque()
        self._cancelled: deque[Job] = deque()
        self._calls: deque[tuple[Future[object], Callable[[], object]]] = deque()
        self._closed = False
        self._lanes = {served.lane.name: served.lane for served in models.values()}
        self._queues: dict[str, FairQueue[Prompt]] = {name: FairQueue() for name in self._lanes}
        self._rows: dict[Ticket, Row] = {}
        self._jobs: dict[Job, Progress] = {}
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End after the step at hand; wait for it."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout=30)

    def submit(self, job: Job) -> None:
        """Queue a job; its pieces come by `deliver`."""
        with self._changed:
            self._submitted.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """End what still runs of a job before its next token; a job that has ended is left so."""
        with self._changed:
            self._cancelled.append(job)
            self._changed.notify()

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function on this thread between two steps, unless its future is cancelled first."""
        future: Future[T] = Future()
        with self._changed:
            self._calls.append((future, function))  # pyright: ignore[reportArgumentType]
            self._changed.notify()
        return future

    def _run(self) -> None:
        try:
            while self._wait():
                self._turn()
        except BaseException as error:
            logger.exception("generation failed")
            self._on_loop(self._failed, error)

    def _wait(self) -> bool:
        """Until there is something to do; False once the thread is to end."""
        with self._changed:
            self._changed.wait_for(self._has_work)
            return not self._closed

    def _has_work(self) -> bool:
        queues = (self._submitted, self._cancelled, self._calls, self._rows, self._jobs)
        return self._closed or any(queues)

    def _turn(self) -> None:
        """One step of each model."""
        with self._changed:
            calls, self._calls = self._calls, deque()
        for future, function in calls:
            self._call(future, function)
        with self._changed:  # as late as can be: who left by now is given no further token
            submitted, self._submitted = self._submitted, deque()
            cancelled, self._cancelled = self._cancelled, deque()
        for job in submitted:
            self._jobs[job] = Progress(left=job.num_rows)
            for number, wanted in enumerate(job.wanted):
                self._queue_of(wanted).add(job.client, (job, number))
        for job in cancelled:
            self._end(job)
        pieces: list[tuple[Job, Piece]] = []
        for lane in self._lanes.values():
            self._admit(lane, pieces)
        busy = [lane for lane in self._lanes.values() if lane.batch.busy]
        for lane in busy:
            self._step(lane, pieces)
        self._metrics.running(*self._counts())
        for lane in busy:
            self._metrics.passes(lane.name, lane.batch.passes)
        if pieces:
            self._on_loop(self._deliver, pieces)

    def _call(self, future: "Future[object]", function: Callable[[], object]) -> None:
        """Compute what a future promises, unless nobody waits for it any more."""
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  # whoever waits for it raises it
            future.set_exception(error)

    def _lane_of(self, wanted: Wanted) -> Lane:
        return self._models[wanted.model].lane

    def _queue_of(self, wanted: Wanted) -> FairQueue[Prompt]:
        return self._queues[self._lane_of(wanted).name]

    def _counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """Responses in a batch, and prompts that wait, by model."""
        running, waiting = dict.fromkeys(self._models, 0), dict.fromkeys(self._models, 0)
        for row in self._rows.values():
            running[row.wanted.model] += 1
        for queue in self._queues.values():
            for job, number in queue:
                waiting[job.wanted[number].model] += 1
        return running, waiting

    def _admit(self, lane: Lane, pieces: list[tuple[Job, Piece]]) -> None:
        """Give free slots to the prompts that wait."""
        queue = self._queues[lane.name]
        of_lane = (self._lane_of(row.wanted) is lane for row in self._rows.values())
        running = sum(of_lane) if queue else 0
        while len(queue) and running < lane.num_slots:
            job, number = queue.take()
            job.started = True
            wanted = job.wanted[number]
            served = self._models[wanted.model]
            first = sum(len(each.keys) for each in job.wanted[:number])
            for row, key in enumerate(wanted.keys, start=first):
                try:
                    ticket = lane.batch.submit(_request(wanted, key, served.adapter))
                except DataError as error:
                    pieces.append((job, Piece(row, error=str(error))))
                    continue
                self._rows[ticket] = Row(job, row, wanted, served)
                self._jobs[job].tickets.add(ticket)
            running += len(wanted.keys)

    def _end(self, job: Job) -> None:
        """Take out what still waits or runs of a job."""
        progress = self._jobs.pop(job, None)
        if progress is None:
            return
        for number, wanted in enumerate(job.wanted):
            self._queue_of(wanted).remove(job.client, (job, number))
        for ticket in progress.tickets:
            self._lane_of(self._rows[ticket].wanted).batch.cancel(ticket)

    def _step(self, lane: Lane, pieces: list[tuple[Job, Piece]]) -> None:
        now = time.perf_counter()
        for event in lane.batch.step():
            row = self._rows[event.ticket]
            if isinstance(event, Token):
                piece = self._token(row, event)
                self._metrics.token(row, event.ticket, now)
                if row.stopped or (piece is not None and piece.error is not None):
                    lane.batch.cancel(event.ticket)
            else:
                piece = self._ended(row, event)
            if piece is not None and row.job in self._jobs:  # else nobody reads it any more
                pieces.append((row.job, piece))
            if isinstance(event, Ended):
                self._count_end(row.job, event.ticket)

    def _token(self, row: Row, event: Token) -> Piece | None:
        """What a token adds; a tokenizer that fails on it ends its response alone."""
        try:
            return row.token(event)
        except Exception:
            logger.exception("the token %d has no text", event.id)
            return row.failed()

    def _ended(self, row: Row, event: Ended) -> Piece | None:
        del self._rows[event.ticket]
        if event.error is not None:
            notes = getattr(event.error, "__notes__", ())
            logger.error("a response failed: %s", "\n".join(notes) or event.error)
        self._metrics.ended(row, event.reason)
        return row.ended(event)

    def _count_end(self, job: Job, ticket: Ticket) -> None:
        progress = self._jobs.get(job)
        if progress is None:
            return
        progress.tickets.discard(ticket)
        progress.left -= 1
        if not progress.left:
            del self._jobs[job]

    def _on_loop(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: the server ends
            self._closed = True


def _request(wanted: Wanted, key: int, adapter: int) -> Request:
    return Request(
        wanted.prompt,
        wanted.sampler,
        key,
        max_new_tokens=wanted.max_new_tokens,
        num_top=wanted.num_top,
        scope=wanted.scope,
        adapter=adapter,
    )
