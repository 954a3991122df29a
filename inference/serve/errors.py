"""What is wrong with a request, as OpenAI's clients read it."""

import json
from typing import Any

from starlette.responses import Response

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
