"""Bodies of requests, errors as OpenAI's clients read them, and responses to clients that leave."""

import asyncio
import json
import math
import re
from collections.abc import AsyncGenerator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
"""The type of an error by its status."""


LEFT = 499
"""Status, in log and metrics, of a request whose client left."""


class ApiError(Exception):
    """A request that is not answered; the message is one sentence that says how to fix it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {
            "error": {
                "message": self.message,
                "type": KINDS[self.status],
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def response(self) -> Response:
        """The HTTP response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(self.body, status=self.status, headers=headers)


def json_response(
    content: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A response of JSON."""
    return Response(as_json(content), status, headers, media_type="application/json")


def as_json(content: object) -> bytes:
    """Compact JSON; a lone surrogate, which UTF-8 has no bytes for, is escaped."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


MAX_DEPTH = 32
"""Objects and lists within one another."""

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
"""Also one that never closes, so that each byte is looked at once."""
_SURROGATE = re.compile(r"[\ud800-\udfff]")


async def read_json(request: Request, *, limit: int, seconds: float) -> dict[str, Any]:
    """The JSON object that a request holds.

    Args:
        request: of any client.
        limit: most bytes.
        seconds: longest time to receive them in.

    Raises:
        ApiError: it holds something else, or too much.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the body must be JSON; send Content-Type: application/json")
    try:
        async with asyncio.timeout(seconds):
            body = await _read(request, limit)
    except TimeoutError:
        raise ApiError(400, f"the body did not come within {seconds:g} seconds") from None
    except ClientDisconnect:
        raise ApiError(400, "the body ended before it was whole") from None
    return parse_json(body)


async def _read(request: Request, limit: int) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdigit() and (len(length) > 15 or int(length) > limit):
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit:,} bytes; send less")


def parse_json(body: bytes) -> dict[str, Any]:
    """The object in a text of JSON.

    Raises:
        ApiError: it is not JSON or no object, is nested too deeply, or has numbers or characters
            that JSON or UTF-8 have no place for.
    """
    if _depth(body) > MAX_DEPTH:
        raise ApiError(400, f"the body nests objects or lists more than {MAX_DEPTH} deep")
    try:
        content = json.loads(body.decode(), parse_constant=_no_number, parse_float=_finite)
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise ApiError(400, f"the body is not valid JSON: {reason}") from None
    if not isinstance(content, dict):
        raise ApiError(400, "the body must be a JSON object")
    if rb"\u" in body and _SURROGATE.search(json.dumps(content, ensure_ascii=False)):
        raise ApiError(400, "the body has half of a surrogate pair, which is not a character")
    return content


def _depth(body: bytes) -> int:
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return 0
    deepest = depth = 0
    for byte in re.findall(rb"[\[\]{}]", _STRING.sub(b"", body)):
        depth += 1 if byte in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not a number")


def _finite(word: str) -> float:
    number = float(word)
    if not math.isfinite(number):
        raise ValueError(f"{word[:20]} is too large for a number")
    return number


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
