"""The lifecycle of a server: listen, serve, drain, stop."""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from inference.serve.config import ServeConfig
from inference.serve.routes import build_app
from inference.serve.state import State
from inference.serve.worker import Worker
from pipeline.cli.options import print_notice
from pipeline.system.errors import EXIT_FAILED, ConfigError

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 * 1024
"""Maximum size of a request line and headers, in bytes."""

KEEP_ALIVE_SECONDS = 75
"""Seconds for which an idle connection stays open: more than in the pools of clients and proxies,
which could otherwise send a request on a connection that is being closed."""


def listen(config: ServeConfig) -> socket.socket:
    """Open the socket that accepts requests.

    Raises:
        ConfigError: the port is taken, or the address can't be bound.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno in (98, 48):  # EADDRINUSE on Linux and macOS
            raise ConfigError(
                f"--port {config.port} on {config.host} is in use; choose another, or use --port 0"
                " for any free port"
            ) from None
        raise ConfigError(
            f"--host {config.host} --port {config.port} can't be bound: {error.strerror}"
        ) from None
    return listener


class TimeoutProtocol(H11Protocol):
    """Disconnects clients that are too slow to send headers or read responses."""

    seconds = 30.0
    _request_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the timer for the connection's first request."""
        super().connection_made(transport)
        self._request_timer = self.loop.call_later(self.seconds, self._close_without_request)

    def data_received(self, data: bytes) -> None:
        """Start the timer when the next request begins; cancel it when its headers are complete."""
        super().data_received(data)
        if self._request_timer is None and self._awaits_headers:
            self._request_timer = self.loop.call_later(self.seconds, self._close_without_request)
        elif self._request_timer is not None and not self._awaits_headers:
            self._request_timer.cancel()
            self._request_timer = None

    @property
    def _awaits_headers(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers, which would keep the connection in memory."""
        super().connection_lost(exc)
        for timer in (self._request_timer, self._write_timer):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        """Start a timer when the client stops reading its response."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the timer once the client resumes reading its response."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def _close_without_request(self) -> None:
        if self._awaits_headers:
            self.transport.abort()


class Server(uvicorn.Server):
    """A server that drains on SIGTERM or Ctrl-C and exits immediately on a second signal."""

    def __init__(self, state: State) -> None:
        config = state.config
        self.state = state
        protocol = type("Protocol", (TimeoutProtocol,), {"seconds": config.idle_seconds})
        super().__init__(
            uvicorn.Config(
                build_app(state),
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=1,
            )
        )
        self._drain_task: asyncio.Task[None] | None = None
        self._worker: Worker | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replace uvicorn's handlers: the first signal drains the server, a second stops it."""
        loop = asyncio.get_running_loop()
        try:
            for signum in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(signum, self._on_signal, signum)
        except (ValueError, RuntimeError):  # not the main thread: the caller stops the server
            pass
        yield

    async def run(self, listener: socket.socket) -> None:  # pyrefly: ignore[bad-override]
        """Serve requests until a signal arrives or generation fails."""
        state = self.state
        self._worker = Worker(state.models, on_failure=self._on_failure)
        self._worker.start()
        state.broker.worker = self._worker
        state.created = int(time.time())
        try:
            await self.serve([listener])
        finally:
            await asyncio.to_thread(self._worker.close)

    def stop(self) -> None:
        """Stop admitting requests, wait for running ones, then stop the server."""
        self.state.broker.draining = True
        if self._drain_task is None:
            self._drain_task = asyncio.get_running_loop().create_task(self._drain_and_stop())

    async def _drain_and_stop(self) -> None:
        deadline = time.monotonic() + self.state.config.drain_seconds
        while self.state.broker.num_open and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if self.state.broker.num_open:
            logger.warning("aborting the unfinished requests (%d)", self.state.broker.num_open)
        self.should_exit = True

    def _on_signal(self, signum: int) -> None:
        if self._drain_task is not None:
            os._exit(128 + signum)
        print_notice("shutting down once running requests finish; repeat the signal to stop now")
        self.stop()

    def _on_failure(self, error: BaseException) -> None:
        self.state.broker.failure = error
        self.should_exit = True


def serve(state: State, listener: socket.socket) -> None:
    """Serve until a signal arrives; raise SystemExit(1) if generation failed."""
    server = Server(state)
    asyncio.run(server.run(listener))
    if state.broker.failure is not None:
        raise SystemExit(EXIT_FAILED)
