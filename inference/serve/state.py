"""Server state, and the event loop's part of generation: admission and delivery."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request

from inference.ratings import RatingsFile
from inference.serve.config import ServeConfig
from inference.serve.http import ApiError
from inference.serve.models import ServedModel, ServedReward
from inference.serve.worker import Job, Piece, Worker

T = TypeVar("T")

COMMENT_SECONDS = 15.0
"""Seconds without a piece after which a comment is sent on a stream."""

MAX_QUEUED_TOKENS = 2**22
"""Maximum total number of prompt tokens in open requests."""


class Broker:
    """Admits requests while there is room and passes them to the generation thread."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self.worker: Worker | None = None
        """The generation thread; no request is admitted without it."""
        self._jobs: set[Job] = set()
        self._num_calls = 0
        self.draining = False
        """Whether the server has stopped admitting requests."""
        self.failure: BaseException | None = None
        """The error that stopped the generation thread."""

    @property
    def is_ready(self) -> bool:
        """Whether new requests are admitted."""
        return self.worker is not None and not self.draining and self.failure is None

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return len(self._jobs) + self._num_calls

    @contextmanager
    def open(self, job: Job) -> Iterator[None]:
        """Run a job until the end of the block; unfinished responses are then cancelled.

        Raises:
            ApiError: the server doesn't admit the job now.
        """
        worker = self._admit(job.num_prompt_tokens)
        self._jobs.add(job)
        try:
            worker.submit(job)
            yield
        finally:
            self._jobs.discard(job)
            worker.cancel(job)

    async def pieces(self, job: Job) -> AsyncIterator[list[Piece]]:
        """Yield the pieces of a job until its responses end; an empty list signals a keep-alive.

        Raises:
            ApiError: the job waits too long for a slot or takes too long, or a response fails.
        """
        num_unfinished = job.num_rows
        start_time = time.monotonic()
        while num_unfinished:
            pieces = await self._next_pieces(job, start_time)
            for piece in pieces:
                if piece.error is not None:
                    raise ApiError(500, piece.error)
                num_unfinished -= piece.finish is not None
            yield pieces

    async def _next_pieces(self, job: Job, start_time: float) -> list[Piece]:
        config, wait_start = self._config, time.monotonic()
        while time.monotonic() - wait_start < COMMENT_SECONDS:
            seconds = time.monotonic() - start_time
            limit = config.request_seconds if job.started else config.queue_seconds
            limit = min(limit, config.request_seconds)
            if seconds >= limit and job.started:
                raise ApiError(504, f"the request took longer than {limit:g} seconds")
            if seconds >= limit:
                raise ApiError(503, f"no slot was free for {limit:g} seconds; try again later")
            if self.failure is not None:
                raise ApiError(500, "generation has failed; the server is shutting down")
            try:
                async with asyncio.timeout(min(1.0, limit - seconds)):
                    return await job.take()
            except TimeoutError:
                continue
        return []

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the generation thread.

        Raises:
            ApiError: the server doesn't admit the call now, or the call takes too long.
        """
        worker = self._admit(0)
        self._num_calls += 1
        future = worker.call(function)
        try:
            async with asyncio.timeout(self._config.request_seconds):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            seconds = self._config.request_seconds
            raise ApiError(504, f"the request took longer than {seconds:g} seconds") from None
        finally:
            self._num_calls -= 1
            future.cancel()

    def _admit(self, num_tokens: int) -> Worker:
        if self.failure is not None:
            raise ApiError(500, "generation has failed; the server is shutting down")
        if self.worker is None or self.draining:
            why = "the server is shutting down" if self.draining else "the models are being loaded"
            raise ApiError(503, f"{why}; try again later")
        num_waiting = sum(not job.started for job in self._jobs) + self._num_calls
        queued_tokens = sum(job.num_prompt_tokens for job in self._jobs)
        if num_waiting >= self._config.queue or queued_tokens + num_tokens > MAX_QUEUED_TOKENS:
            raise ApiError(429, f"the queue is full (requests: {num_waiting}); try again later")
        return self.worker


@dataclass
class State:
    """Models, files and limits of a server."""

    config: ServeConfig
    keys: Mapping[str, str]
    """API keys by their names in the log; empty if no key is required."""
    models: Mapping[str, ServedModel]
    reward: ServedReward | None = None
    ratings: RatingsFile | None = None
    created: int = 0
    """Time at which the server started, in seconds since 1970."""

    def __post_init__(self) -> None:
        self.broker = Broker(self.config)

    def model(self, name: str) -> ServedModel:
        """Return the model with this name; the first one if the name is empty.

        Raises:
            ApiError: there is no such model.
        """
        if not self.models:
            raise ApiError(
                404, "no model is served; start the server with --path DIR", code="model_not_found"
            )
        if not name:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise ApiError(
                404,
                f"no such model: {name[:64]}; available models: {', '.join(self.models)}",
                param="model",
                code="model_not_found",
            )
        return self.models[name]


def get_state(request: Request) -> State:
    """Return the state of the request's server."""
    return request.app.state.server


def get_client(request: Request) -> str:
    """Return the client's name for scheduling and logs: its key's name, or else its address."""
    name = request.scope.get("key_name")
    return str(name or (request.client.host if request.client else "?"))
