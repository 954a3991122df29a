"""The body of a request: read within limits, and nothing but plain JSON let through."""

import asyncio
import json
import math
import re
from typing import Any

from starlette.requests import ClientDisconnect, Request

from inference.serve.errors import ApiError

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
