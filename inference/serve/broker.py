"""The event loop's side of generation: admission of requests, and delivery of responses."""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from inference.serve.config import ServeConfig
from inference.serve.http import ApiError
from inference.serve.jobs import Job, Piece, Wanted
from inference.serve.worker import Worker

T = TypeVar("T")

QUIET = 15.0
"""Seconds without anything to read, after which a stream is given a sign of life."""

QUEUED_TOKENS = 2**22
"""Tokens of all prompts that are in the server at once, at most."""


class Broker:
    """Lets requests in while there is room, and has the generation thread answer them."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._worker: Worker | None = None
        self._jobs: set[Job] = set()
        self._calls = 0
        self._ends: deque[float] = deque(maxlen=32)
        self.draining = False
        """Whether nothing new is let in."""
        self.failure: BaseException | None = None
        """What ended the generation thread."""

    def attach(self, worker: Worker) -> None:
        """From now on requests are answered."""
        self._worker = worker

    @property
    def is_ready(self) -> bool:
        """Whether requests are let in."""
        return self._worker is not None and not self.draining and self.failure is None

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._jobs) + self._calls

    @contextmanager
    def open(self, wanted: Sequence[Wanted], client: str, *, streams: bool) -> Iterator[Job]:
        """A job that runs until the end of the block; whatever is left of it then is cancelled.

        Raises:
            ApiError: the server doesn't take it now.
        """
        worker = self._admit(sum(len(each.prompt) for each in wanted))
        job = Job(wanted, client, streams=streams)
        self._jobs.add(job)
        try:
            worker.submit(job)
            yield job
        finally:
            self._jobs.discard(job)
            worker.cancel(job)
            self._ends.append(time.monotonic())

    async def pieces(self, job: Job) -> AsyncIterator[list[Piece]]:
        """What comes of a job until all of its responses have ended; nothing every `QUIET` seconds.

        Raises:
            ApiError: it waits too long for a slot, takes too long, or a response failed.
        """
        left = job.num_rows
        began = time.monotonic()
        while left:
            pieces = await self._next(job, began)
            for piece in pieces:
                if piece.error is not None:
                    raise ApiError(500, piece.error)
                left -= piece.finish is not None
            yield pieces

    async def _next(self, job: Job, began: float) -> list[Piece]:
        config, since = self._config, time.monotonic()
        while time.monotonic() - since < QUIET:
            seconds = time.monotonic() - began
            limit = config.request_seconds if job.started else config.queue_seconds
            limit = min(limit, config.request_seconds)
            if seconds >= limit and job.started:
                raise ApiError(504, f"the request took longer than {limit:g} seconds")
            if seconds >= limit:
                raise self._busy(503, f"no slot was free for {limit:g} seconds; try again later")
            if self.failure is not None:
                raise ApiError(500, "generation has failed, and the server ends")
            try:
                async with asyncio.timeout(min(1.0, limit - seconds)):
                    return await job.take()
            except TimeoutError:
                continue
        return []

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the generation thread.

        Raises:
            ApiError: the server doesn't take it now, or it takes too long.
        """
        worker = self._admit(0)
        self._calls += 1
        future = worker.call(function)
        try:
            async with asyncio.timeout(self._config.request_seconds):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            seconds = self._config.request_seconds
            raise ApiError(504, f"the request took longer than {seconds:g} seconds") from None
        finally:
            self._calls -= 1
            future.cancel()

    def _admit(self, num_tokens: int) -> Worker:
        if self.failure is not None:
            raise ApiError(500, "generation has failed, and the server ends")
        if self._worker is None or self.draining:
            what = "the server is about to end" if self.draining else "the models are being loaded"
            raise self._busy(503, f"{what}; try again later")
        waiting = sum(not job.started for job in self._jobs) + self._calls
        tokens = sum(job.num_prompt_tokens for job in self._jobs)
        if waiting >= self._config.queue or tokens + num_tokens > QUEUED_TOKENS:
            raise self._busy(429, f"{waiting} requests wait already; try again later")
        return self._worker

    def _busy(self, status: int, message: str) -> ApiError:
        """With the seconds after which a slot should be free, by how fast requests ended."""
        seconds = 1.0
        if len(self._ends) > 1:
            apart = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
            seconds = apart * sum(not job.started for job in self._jobs)
        return ApiError(status, message, retry_after=math.ceil(min(max(seconds, 1), 60)))


def deliver(pieces: list[tuple[Job, Piece]]) -> None:
    """Hand pieces to their jobs."""
    for job, piece in pieces:
        job.put(piece)
