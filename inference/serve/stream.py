"""Responses that end when their client leaves: streams of events, and plain ones."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inference.serve.errors import ApiError, as_json

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
SIGN_OF_LIFE = b": waiting\n\n"


class ClientGone(Exception):  # noqa: N818 - no error of ours: its request is over
    """Nobody waits for the response any more."""


def event(content: object) -> bytes:
    """A server-sent event."""
    return b"data: " + as_json(content) + b"\n\n"


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; it is cancelled as soon as the client leaves.

    Args:
        receive: of a request whose body was read.
        work: what the client waits for.

    Raises:
        ClientGone: the client left.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _end(watcher)
        await _end(task)


class EventStream(Response):
    """Sends events as they come; its source is closed when the client leaves.

    An `ApiError` of the source becomes the last event, without the word that all is done.
    """

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[bytes], headers: dict[str, str]) -> None:
        self._source = source
        super().__init__(
            headers={**headers, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send all events."""
        try:
            with suppress(ClientGone):
                await until_gone(receive, self._send_all(send))
        finally:  # also where nothing of it was sent
            await self._source.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for part in self._source:
                await self._send(send, part)
        except ApiError as error:
            await self._send(send, event(error.body))
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: "asyncio.Future[Any]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await task
