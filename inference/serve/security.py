"""Access control and security headers; docs/serving.md lists the guarantees."""

import hmac
import logging
import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference.serve.config import LOOPBACK
from inference.serve.http import CLIENT_CLOSED, ApiError
from inference.serve.state import State

logger = logging.getLogger(__name__)

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class AccessControl:
    """Admits or rejects requests, and logs them.

    Args:
        app: handles the requests.
        state: the server's state.
        open_paths: paths that require no key: health and the page's own files.
    """

    def __init__(self, app: ASGIApp, state: State, open_paths: frozenset[str]) -> None:
        self._app = app
        self._config = state.config
        self._keys = state.keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_time, status = time.perf_counter(), CLIENT_CLOSED
        headers = Headers(scope=scope)

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        try:
            await self._handle(scope, receive, send_with_headers, headers)
        except Exception:  # the client already has a response
            logger.exception("a request failed")
        finally:
            self._log(scope, status, time.perf_counter() - start_time)

    async def _handle(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        try:
            self._check_host(headers)
            self._check_origin(scope["method"], headers)
            if scope["path"] not in self._open_paths:
                scope["key_name"] = self._check_key(headers)
        except ApiError as error:
            await error.response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        """On loopback addresses, reject other host names, to prevent DNS rebinding."""
        if not self._config.is_local:
            return
        try:
            name = urlsplit(f"//{headers.get('host', '')}").hostname
        except ValueError:  # an invalid IPv6 address
            name = None
        if name not in LOOPBACK:
            raise ApiError(403, "the Host header must name this machine: 127.0.0.1 or localhost")

    def _check_origin(self, method: str, headers: Headers) -> None:
        """Reject requests from pages of other origins, except reads."""
        origin = headers.get("origin")
        is_cross_site = headers.get("sec-fetch-site") == "cross-site"
        if origin is not None:  # its scheme is https behind a proxy
            is_cross_site |= origin.partition("://")[2].lower() != headers.get("host", "").lower()
        if method not in SAFE_METHODS and is_cross_site:
            raise ApiError(403, "the request comes from a page that is not the server's")

    def _check_key(self, headers: Headers) -> str | None:
        """Return the name of the request's key, or None if no key is required."""
        if not self._keys:
            return None
        scheme, _, value = headers.get("authorization", "").partition(" ")
        token = value.strip().encode() if scheme.lower() == "bearer" else b""
        # Compare with every key, in constant time.
        names = [
            name for name, key in self._keys.items() if hmac.compare_digest(key.encode(), token)
        ]
        if not names:
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
            )
        return names[0]

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        if not self._config.log_requests or route == "/health":
            return
        client = scope.get("key_name") or (scope.get("client") or ("?",))[0]
        logger.info("%s %s %s %d %.3f s", client, scope["method"], route, status, seconds)
