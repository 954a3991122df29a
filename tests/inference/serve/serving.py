"""A server in this process on a free port, and raw HTTP requests."""

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from inference.ratings import RatingsFile
from inference.serve.config import ServeConfig, read_keys
from inference.serve.models import ModelPath, load_models
from inference.serve.server import Server, listen
from inference.serve.state import State

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
in_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="needs chromium, a package of most distributions"
)
TINY = "embedded"
"""Its random weights generate incomplete characters too, and seldom an end of sequence."""


@dataclass
class LiveServer:
    """A running server."""

    port: int
    server: Server
    loop: asyncio.AbstractEventLoop

    @property
    def state(self) -> State:
        return self.server.state

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause generation within the block."""
        paused_event, resume = threading.Event(), threading.Event()

        def wait() -> None:
            paused_event.set()
            resume.wait(60)

        worker = self.server._worker
        assert worker is not None
        worker.call(wait)
        paused_event.wait(60)
        try:
            yield
        finally:
            resume.set()

    def is_idle(self) -> bool:
        """Return whether no request waits or runs."""
        worker = self.server._worker
        assert worker is not None
        waiting = any(worker._waiting.values()) or bool(self.state.broker._jobs)
        busy = any(model.batch.busy for model in self.state.models.values())
        return worker.is_idle and not waiting and not busy


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Wait for a condition; return whether it became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@contextmanager
def serving(
    models_to_serve: tuple[ModelPath, ...] = (ModelPath("tiny", TINY),),
    reward: str | None = None,
    send_buffer: int | None = None,
    **settings: Any,
) -> Iterator[LiveServer]:
    """Run a server with these settings within the block.

    `send_buffer` limits the bytes that the system buffers for a client that doesn't read.
    """
    names = tuple(model.path for model in models_to_serve)
    config = ServeConfig(**{"path": names, "port": 0, "slots": 4, "drain_seconds": 0, **settings})
    models, served_reward = load_models(config, models_to_serve, reward)
    state = State(config, read_keys(config), models, reward=served_reward)
    listener = listen(config)
    if send_buffer is not None:  # connections inherit it from the listener
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    started: list[LiveServer] = []
    ready = threading.Event()

    async def run() -> None:
        server = Server(state)
        started.append(LiveServer(listener.getsockname()[1], server, asyncio.get_running_loop()))
        asyncio.get_running_loop().call_soon(ready.set)
        await server.run(listener)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    ready.wait(30)
    (running,) = started
    wait_until(lambda: state.broker.is_ready and running.server.started)
    try:
        yield running
    finally:
        running.loop.call_soon_threadsafe(running.server.stop)
        thread.join(30)
        listener.close()
        assert not thread.is_alive()


@contextmanager
def serving_page(out: Path) -> Iterator[LiveServer]:
    """Run a server with which every view of the page works; its files go to `out`."""
    two = (ModelPath("first", TINY), ModelPath("second", TINY, seed=1))
    with serving(two, max_tokens_default=12) as running:
        running.state.ratings = RatingsFile(out / "ratings.jsonl")
        yield running


def request_bytes(
    path: str, body: object = None, *, method: str = "POST", headers: dict[str, str] | None = None
) -> bytes:
    """Return a complete HTTP request that closes its connection."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    content = b"" if body is None else content
    fields = {
        "Host": "127.0.0.1",
        "Connection": "close",
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        **(headers or {}),
    }
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + content


@dataclass
class HttpResponse:
    """An HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


def send(running: LiveServer, data: bytes) -> HttpResponse:
    """Send the bytes of a request and receive the response."""
    with running.connect() as connection:
        connection.sendall(data)
        return receive(connection)


def receive(connection: socket.socket) -> HttpResponse:
    """Receive and parse a response, until the server closes the connection."""
    chunks = []
    while part := connection.recv(65536):
        chunks.append(part)
    head, _, body = b"".join(chunks).partition(b"\r\n\r\n")
    if not head:
        return HttpResponse(0, {}, b"")
    first, *fields = head.decode("latin-1").split("\r\n")
    headers = {}
    for field in fields:
        name, _, value = field.partition(":")
        headers[name.lower()] = value.strip()
    if headers.get("transfer-encoding") == "chunked":
        body = _join_chunks(body)
    return HttpResponse(int(first.split()[1]), headers, body)


def _join_chunks(chunks: bytes) -> bytes:
    contents = []
    while chunks:
        size, _, rest = chunks.partition(b"\r\n")
        contents.append(rest[: int(size, 16)])
        chunks = rest[int(size, 16) + 2 :]
    return b"".join(contents)


def post(running: LiveServer, path: str, body: object, **headers: str) -> HttpResponse:
    """Return the response to a request with a JSON body."""
    return send(running, request_bytes(path, body, headers=headers))


def get(running: LiveServer, path: str, **headers: str) -> HttpResponse:
    """Return the response to a request without a body."""
    return send(running, request_bytes(path, method="GET", headers=headers))


def chat(text: str = "What is 2 plus 2?", **fields: Any) -> dict[str, Any]:
    """Return the body of a chat request with one message."""
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def make_client(server: LiveServer) -> Any:
    """Return a client of OpenAI's package."""
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def stream_events(response: HttpResponse) -> list[dict[str, Any]]:
    """Return the objects of a stream, which must end with [DONE]."""
    *parts, last, rest = response.body.decode().split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts if part.startswith("data: ")]
