"""Disconnects, timeouts and shutdown leave no requests in the server."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from tests.inference.serve.serving import (
    CHAT,
    COMPLETIONS,
    LiveServer,
    chat,
    post,
    receive,
    request_bytes,
    serving,
    stream_events,
    wait_until,
)

ECHO = {"model": "tiny", "prompt": "Hi", "echo": True, "logprobs": 0, "max_tokens": 1}
PROBE = chat("Hello", seed=5, max_tokens=6, logprobs=True)


def disconnect_at_random(server: LiveServer, seed: int) -> None:
    """Send a request, read a little or nothing of the response, and disconnect."""
    rng = random.Random(seed)
    body = chat(
        f"Number {seed}?",
        seed=seed,
        stream=rng.random() < 0.6,
        n=rng.choice((1, 1, 3)),
        max_tokens=rng.choice((1, 20, 150)),
        stop="e",
    )
    data = request_bytes(CHAT, body)
    with server.connect() as connection:
        connection.sendall(data[: rng.randrange(len(data))] if seed % 7 == 0 else data)
        if rng.random() < 0.7:
            time.sleep(rng.random() * 0.2)
        connection.settimeout(0.05)
        for _ in range(rng.randrange(4)):
            try:
                connection.recv(200)
            except OSError:
                break


def disconnect_clients(server: LiveServer, count: int) -> None:
    with ThreadPoolExecutor(24) as pool:
        list(pool.map(lambda number: disconnect_at_random(server, number), range(count)))


def count_threads() -> int:
    """Return the number of threads, without the permanent ones of the event loop's pool."""
    return sum(not thread.name.startswith("asyncio") for thread in threading.enumerate())


def read_tokens(server: LiveServer) -> list[str]:
    (choice,) = post(server, CHAT, PROBE).json["choices"]
    return [entry["token"] for entry in choice["logprobs"]["content"]]


def assert_no_requests_remain(server: LiveServer, count: int) -> None:
    before = read_tokens(server)
    num_threads = count_threads()

    disconnect_clients(server, count)

    assert wait_until(server.is_idle)
    assert wait_until(lambda: server.state.broker.num_open == 0)
    assert wait_until(lambda: count_threads() <= num_threads)
    assert wait_until(lambda: len(server.server.server_state.connections) == 0)
    assert read_tokens(server) == before


def test_disconnected_clients_leave_no_requests(server: LiveServer) -> None:
    assert_no_requests_remain(server, 100)


@pytest.mark.parametrize("streams", [True, False])
def test_responses_stop_when_their_client_disconnects(server: LiveServer, *, streams: bool) -> None:
    """Three responses of 200 tokens were requested."""
    connection = server.connect()
    connection.sendall(
        request_bytes(CHAT, chat(stream=streams, max_tokens=200, n=3, min_tokens=200))
    )
    worker = server.server._worker
    assert worker is not None
    assert wait_until(lambda: len(worker._active) == 3)
    tickets = list(worker._active)

    with server.paused():
        connection.close()
        assert wait_until(lambda: server.state.broker.num_open == 0)
        lengths = [len(ticket.response.ids) for ticket in tickets]

    assert wait_until(server.is_idle)
    assert [len(ticket.response.ids) for ticket in tickets] == lengths


def test_shutdown_finishes_running_and_rejects_new_requests() -> None:
    with serving(drain_seconds=30) as server:
        connection = server.connect()
        connection.sendall(request_bytes(CHAT, chat(stream=True, max_tokens=60, min_tokens=60)))
        assert wait_until(lambda: server.state.broker.num_open == 1)
        with server.paused(), server.connect() as echo_connection:
            echo_connection.sendall(request_bytes(COMPLETIONS, ECHO))
            assert wait_until(lambda: server.state.broker.num_open == 2)
            server.loop.call_soon_threadsafe(server.server.stop)
            assert wait_until(lambda: server.state.broker.draining)
            rejected = post(server, CHAT, chat())
            ready = server.connect()
            ready.sendall(request_bytes("/ready", method="GET"))
            assert receive(ready).status == 503
            ready.close()
        response = receive(connection)
        connection.close()

    assert rejected.status == 503
    assert "shutting down" in rejected.error["message"]
    assert stream_events(response)[-1]["choices"][0]["finish_reason"] == "length"


def test_requests_time_out_in_the_queue_and_while_running() -> None:
    with serving(slots=1, queue_seconds=0.2, request_seconds=0.4) as server:
        with server.paused():
            queued, scored = post(server, CHAT, chat()), post(server, COMPLETIONS, ECHO)
        connection = server.connect()
        connection.sendall(request_bytes(CHAT, chat(max_tokens=200, min_tokens=200)))
        assert wait_until(lambda: server.server._worker._active)
        with server.paused():
            running = receive(connection)
        connection.close()

    assert (queued.status, scored.status, running.status) == (503, 504, 504)
    assert "no slot was free for 0.2 seconds" in queued.error["message"]
    for timed_out in (scored, running):
        assert "the request took longer than 0.4 seconds" in timed_out.error["message"]


def test_each_request_must_send_its_headers_in_time() -> None:
    with serving(idle_seconds=0.5) as server, server.connect() as connection:
        request = request_bytes("/ready", method="GET", headers={"Connection": "keep-alive"})
        connection.sendall(request)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        assert server.server.config.timeout_keep_alive > 60  # as long as nginx's pool
        connection.sendall(request[:20])
        start = time.monotonic()
        while connection.recv(65536):  # until the server closes the connection
            pass

    assert 0.3 < time.monotonic() - start < 4


def test_server_stops_when_generation_fails() -> None:
    with suppress(RuntimeError), serving() as server:  # the loop that stops it is already closed
        server.state.models["tiny"].batch.close()
        failed = post(server, CHAT, chat())
        assert wait_until(server.loop.is_closed)

    assert failed.status == 500
    assert "generation has failed; the server is shutting down" in failed.error["message"]
