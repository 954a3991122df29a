"""Request bodies, errors in OpenAI's format, and clients that disconnect."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from pydantic_core import from_json
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive

from inference.serve.config import ServeConfig

T = TypeVar("T")

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
"""Error types by HTTP status; the type is `invalid_request_error` for all others."""

RETRY_SECONDS = 5
"""Value of `Retry-After` in responses with status 429 or 503."""

CLIENT_CLOSED = 499
"""Status logged for a request whose client disconnected."""

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"


class ApiError(Exception):
    """A rejected or failed request; the message is one sentence, with a fix if there is one."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {
            "error": {
                "message": self.message,
                "type": ERROR_TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def response(self) -> Response:
        """The HTTP response."""
        headers = {"Retry-After": str(RETRY_SECONDS)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(self.body, status=self.status, headers=headers)


class ClientDisconnected(Exception):  # noqa: N818 - not an error: its request is over
    """The client disconnected before the response was sent."""


def json_response(
    content: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a JSON response."""
    return Response(to_json(content), status, headers, media_type="application/json")


def to_json(content: object) -> bytes:
    """Encode an object as compact JSON."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode(errors="backslashreplace")  # lone surrogates


async def read_body(request: Request) -> dict[str, Any]:
    """Read the JSON object of a request, within the server's limits on size and time.

    Raises:
        ApiError: the body is not a JSON object, is too large, or arrives too late.
    """
    config: ServeConfig = request.app.state.server.config
    seconds = config.idle_seconds
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, "the body must be JSON; send Content-Type: application/json")
    try:
        async with asyncio.timeout(seconds):
            body = await _read_limited(request, int(config.max_body_mib * 2**20))
    except TimeoutError:
        raise ApiError(400, f"the body was not received within {seconds:g} seconds") from None
    except ClientDisconnect:
        raise ApiError(400, "the body ended before it was complete") from None
    try:
        content = from_json(body, allow_inf_nan=False)  # also limits the nesting depth
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(content, dict):
        raise ApiError(400, "the body must be a JSON object")
    return content


async def _read_limited(request: Request, limit: int) -> bytes:
    too_large = ApiError(413, f"the body is larger than {limit:,} bytes")
    length = request.headers.get("content-length", "")
    if length.isdigit() and (len(length) > 15 or int(length) > limit):
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def format_event(content: object) -> bytes:
    """Format a server-sent event."""
    return b"data: " + to_json(content) + b"\n\n"


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it when the client disconnects.

    `receive` belongs to a request whose body has been read.

    Raises:
        ClientDisconnected: the client disconnected first.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        for future in (watcher, task):
            future.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await future


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def stream_response(source: AsyncGenerator[bytes], headers: dict[str, str]) -> Response:
    """Return a response that streams events; the source is closed if the client disconnects.

    An `ApiError` from the source becomes the last event.
    """

    async def events() -> AsyncIterator[bytes]:
        try:
            async for part in source:
                yield part
        except ApiError as error:
            yield format_event(error.body)

    async def close() -> None:
        await source.aclose()

    return StreamingResponse(
        events(),
        headers={**headers, "Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        media_type="text/event-stream",
        background=BackgroundTask(close),  # even if nothing was sent
    )
