"""The generation thread, which owns the models and their batches, and the jobs that it runs.

Other threads use `submit`, `cancel` and `call`; results go to the event loop once per step.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from inference.engine.requests import EndEvent, Request, Ticket, TokenEvent
from inference.engine.sampling import TokenLogprobs
from inference.serve.models import ServedModel
from inference.text import ResponseText

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass
class Piece:
    """A piece of a response."""

    row: int
    """Index among the responses of the job."""
    text: str = ""
    ids: list[int] = field(default_factory=list)
    """Tokens since the last piece, including a stop token."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the tokens with text, if they are requested."""
    num_reused: int = 0
    """Number of prompt tokens whose keys and values were reused; 0 after the first piece."""
    finish: Literal["stop", "length"] | None = None
    """The reason why the response ended; None if it hasn't ended."""
    error: str | None = None
    """The reason why the response failed; None if it hasn't failed."""

    def join(self, later: "Piece") -> None:
        """Append the next piece."""
        self.text += later.text
        self.ids += later.ids
        self.logprobs += later.logprobs
        self.num_reused += later.num_reused
        self.finish, self.error = later.finish, later.error


class Job:
    """A client's request, and the unread pieces of its responses.

    Args:
        model: name of the model.
        prompts: for each prompt, the requests for its responses.
        client: name of the client.
        stops: stop strings, before which responses end.
        continues: whether responses continue the texts of their prompts.
        streams: whether pieces are delivered immediately; otherwise each response is one piece.
    """

    def __init__(
        self,
        model: str,
        prompts: Sequence[Sequence[Request]],
        client: str,
        *,
        stops: Sequence[str],
        continues: bool,
        streams: bool,
    ) -> None:
        self.model, self.prompts, self.client = model, prompts, client
        self.stops, self.continues, self.streams = stops, continues, streams
        self.num_rows = sum(map(len, prompts))
        self.num_prompt_tokens = sum(len(requests[0].prompt) for requests in prompts)
        """Tokens of all prompts, each prompt counted once."""
        self.num_unfinished = self.num_rows
        """Number of unfinished responses; used only by the generation thread, like `tickets`."""
        self.tickets: set[Ticket] = set()
        """Requests in the batch."""
        self.started = False
        """Whether any of the job's prompts was given a slot; set by the generation thread."""
        self._pieces: dict[int, Piece] = {}
        self._ready = asyncio.Event()

    def put(self, piece: Piece) -> None:
        """Add a piece; unread pieces of a response are joined."""
        unread = self._pieces.get(piece.row)
        if unread is None:
            self._pieces[piece.row] = piece
        else:
            unread.join(piece)
        self._ready.set()

    async def take(self) -> list[Piece]:
        """Wait for pieces, and return them in row order."""
        await self._ready.wait()
        self._ready.clear()
        pieces, self._pieces = self._pieces, {}
        return [pieces[row] for row in sorted(pieces)]


class ResponseState:
    """State of one response of a job."""

    def __init__(self, job: Job, row: int, served: ServedModel) -> None:
        self.job = job
        self._text = ResponseText(served.token_bytes, job.stops, starts_text=not job.continues)
        self._piece = Piece(row)
        self._has_token = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the response."""
        return self._text.stopped

    def add_token(self, event: TokenEvent) -> Piece | None:
        """Add a token; if the job streams, return the piece that the token completes."""
        if self.stopped:
            return None
        self._piece.ids.append(event.id)
        if not self._has_token:
            self._has_token, self._piece.num_reused = True, event.ticket.num_reused
        if event.id in event.ticket.sampler.stop_ids:
            return None
        self._piece.text += self._text.add(event.id)
        if event.top_logprobs is not None:
            self._piece.logprobs.append(event.top_logprobs)
        if not self.job.streams or not self._piece.text:
            return None
        return self._pop_piece()

    def finish(self, event: EndEvent) -> Piece | None:
        """Return the last piece, or None if the client cancelled the response."""
        if event.reason == "cancelled" and not self.stopped:
            return None
        self._piece.text += self._text.finish()
        if event.error is not None:
            return self.fail()
        self._piece.finish = "stop" if self.stopped or event.reason == "stop" else "length"
        return self._pop_piece()

    def fail(self) -> Piece:
        """Return the last piece of a response that failed."""
        self._piece.error = "the response could not be generated; see the server's log"
        return self._pop_piece()

    def _pop_piece(self) -> Piece:
        piece, self._piece = self._piece, Piece(self._piece.row)
        return piece


class Worker:
    """Runs the batches of all models, alternating their steps.

    Args:
        models: models by name.
        on_failure: called on the event loop if the thread fails.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        *,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._models = models
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._condition = threading.Condition()
        self._submitted: deque[Job] = deque()
        self._cancelled: deque[Job] = deque()
        self._calls: deque[tuple[Future[object], Callable[[], object]]] = deque()
        self._closed = False
        self._waiting: dict[str, list[tuple[Job, int]]] = {name: [] for name in models}
        """Jobs with the indices of their prompts that have no slot, by model, oldest first."""
        self._last_turns: dict[str, int] = {}
        """The last turn in which each client got a slot."""
        self._active: dict[Ticket, ResponseState] = {}
        self._jobs: set[Job] = set()
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread after the current step, and wait for it."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join(timeout=30)

    def submit(self, job: Job) -> None:
        """Queue a job; the event loop adds the pieces of its responses to it."""
        with self._condition:
            self._submitted.append(job)
            self._condition.notify()

    def cancel(self, job: Job) -> None:
        """End a job's responses before their next tokens; do nothing if it has ended."""
        with self._condition:
            self._cancelled.append(job)
            self._condition.notify()

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function on the thread between two steps, unless its future is cancelled first."""
        future: Future[T] = Future()
        with self._condition:
            self._calls.append((future, function))  # pyrefly: ignore[bad-argument-type]
            self._condition.notify()
        return future

    @property
    def is_idle(self) -> bool:
        """Whether no job or call is waiting or running."""
        return not (self._submitted or self._cancelled or self._calls or self._active or self._jobs)

    def _run(self) -> None:
        try:
            while True:
                with self._condition:
                    self._condition.wait_for(lambda: self._closed or not self.is_idle)
                    if self._closed:
                        return
                    calls, self._calls = self._calls, deque()
                for future, function in calls:
                    _run_call(future, function)
                self._step()
        except BaseException as error:
            logger.exception("generation failed")
            self._call_on_loop(self._on_failure, error)

    def _step(self) -> None:
        """Apply submissions and cancellations, fill free slots, and run a step of each model."""
        with self._condition:  # late, so that cancelled jobs get no further tokens
            submitted, self._submitted = self._submitted, deque()
            cancelled, self._cancelled = self._cancelled, deque()
        for job in submitted:
            self._jobs.add(job)
            self._waiting[job.model] += ((job, number) for number in range(len(job.prompts)))
        for job in cancelled:
            self._cancel_job(job)
        for served in self._models.values():
            self._admit(served)
        pieces: list[tuple[Job, Piece]] = []
        for served in self._models.values():
            if served.batch.busy:
                self._decode(served, pieces)
        if pieces:
            self._call_on_loop(_deliver, pieces)

    def _admit(self, served: ServedModel) -> None:
        """Give free slots to waiting prompts, round-robin over clients."""
        queue = self._waiting[served.name]
        running = 0
        if queue:
            running = sum(response.job.model == served.name for response in self._active.values())
        while queue and running < served.num_slots:
            job, number = min(queue, key=lambda item: self._last_turns.get(item[0].client, -1))
            queue.remove((job, number))
            self._last_turns[job.client] = max(self._last_turns.values(), default=0) + 1
            job.started = True
            requests = job.prompts[number]
            first = sum(map(len, job.prompts[:number]))
            for row, request in enumerate(requests, start=first):
                ticket = served.batch.submit(request)
                self._active[ticket] = ResponseState(job, row, served)
                job.tickets.add(ticket)
            running += len(requests)
        if not any(self._waiting.values()):
            self._last_turns.clear()

    def _cancel_job(self, job: Job) -> None:
        """Remove a job's waiting prompts, and cancel its responses."""
        if job not in self._jobs:
            return
        self._jobs.remove(job)
        queue = self._waiting[job.model]
        queue[:] = [item for item in queue if item[0] is not job]
        for ticket in job.tickets:
            self._models[job.model].batch.cancel(ticket)

    def _decode(self, served: ServedModel, pieces: list[tuple[Job, Piece]]) -> None:
        for event in served.batch.step():
            response = self._active[event.ticket]
            if isinstance(event, TokenEvent):
                piece = self._handle_token(response, event)
                if response.stopped or (piece is not None and piece.error is not None):
                    served.batch.cancel(event.ticket)
            else:
                piece = self._handle_end(response, event)
            if piece is not None and response.job in self._jobs:
                pieces.append((response.job, piece))
            if isinstance(event, EndEvent):
                response.job.tickets.discard(event.ticket)
                response.job.num_unfinished -= 1
                if not response.job.num_unfinished:
                    self._jobs.discard(response.job)

    def _handle_token(self, response: ResponseState, event: TokenEvent) -> Piece | None:
        """Return the piece that a token completes; a tokenizer error ends only its response."""
        try:
            return response.add_token(event)
        except Exception:
            logger.exception("token %d can't be decoded", event.id)
            return response.fail()

    def _handle_end(self, response: ResponseState, event: EndEvent) -> Piece | None:
        del self._active[event.ticket]
        if event.error is not None:
            notes = getattr(event.error, "__notes__", ())
            logger.error("failed to generate a response: %s", "\n".join(notes) or event.error)
        return response.finish(event)

    def _call_on_loop(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: the server is shutting down
            self._closed = True


def _run_call(future: "Future[object]", function: Callable[[], object]) -> None:
    """Set the result of a future, unless it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001  # re-raised where the future is awaited
        future.set_exception(error)


def _deliver(pieces: list[tuple[Job, Piece]]) -> None:
    for job, piece in pieces:
        job.put(piece)
