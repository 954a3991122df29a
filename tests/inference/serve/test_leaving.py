"""Clients that leave, stop reading or wait too long: nothing of theirs stays in the server."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from tests.inference.serve.serving import (
    CHAT,
    COMPLETIONS,
    Running,
    chat,
    events,
    post,
    receive,
    request_bytes,
    serving,
    until,
)

ECHO = {"model": "tiny", "prompt": "Hi", "echo": True, "logprobs": 0, "max_tokens": 1}
CANARY = chat("Hello", seed=5, max_tokens=6, logprobs=True)


def leave_at_random(server: Running, seed: int) -> None:
    """Ask, streamed or plain, read a little or nothing, and go."""
    chance = random.Random(seed)
    body = chat(
        f"Number {seed}?",
        seed=seed,
        stream=chance.random() < 0.6,
        n=chance.choice((1, 1, 3)),
        max_tokens=chance.choice((1, 20, 150)),
        stop="e",
    )
    data = request_bytes(CHAT, body)
    with server.connect() as connection:
        connection.sendall(data[: chance.randrange(len(data))] if seed % 7 == 0 else data)
        if chance.random() < 0.7:
            time.sleep(chance.random() * 0.2)
        connection.settimeout(0.05)
        for _ in range(chance.randrange(4)):
            try:
                connection.recv(200)
            except OSError:
                break


def leave_together(server: Running, count: int) -> None:
    with ThreadPoolExecutor(24) as pool:
        list(pool.map(lambda number: leave_at_random(server, number), range(count)))


def count_threads() -> int:
    """Threads other than those of the event loop's pool, which stay."""
    return sum(not each.name.startswith("asyncio") for each in threading.enumerate())


def read_tokens(server: Running) -> list[str]:
    (choice,) = post(server, CHAT, CANARY).json["choices"]
    return [each["token"] for each in choice["logprobs"]["content"]]


def check_nothing_is_left(server: Running, count: int) -> None:
    before = read_tokens(server)
    num_threads = count_threads()

    leave_together(server, count)

    assert until(server.is_idle)
    assert until(lambda: server.state.broker.num_open == 0)
    assert until(lambda: count_threads() <= num_threads)
    assert until(lambda: len(server.server.server_state.connections) == 0)
    assert read_tokens(server) == before


def test_of_100_clients_that_leave_at_random_instants_nothing_is_left(server: Running) -> None:
    check_nothing_is_left(server, 100)


@pytest.mark.parametrize("streams", [True, False])
def test_what_a_client_that_left_asked_for_ends_before_the_next_step(
    server: Running, *, streams: bool
) -> None:
    """Though it was to have 200 tokens, of three responses."""
    connection = server.connect()
    connection.sendall(
        request_bytes(CHAT, chat(stream=streams, max_tokens=200, n=3, min_tokens=200))
    )
    worker = server.server._worker
    assert worker is not None
    assert until(lambda: len(worker._rows) == 3)
    rows = list(worker._rows)

    with server.paused():
        connection.close()
        assert until(lambda: server.state.broker.num_open == 0)
        lengths = [len(ticket.response.ids) for ticket in rows]

    assert until(server.is_idle)
    assert [len(ticket.response.ids) for ticket in rows] == lengths


def test_a_server_that_ends_lets_running_requests_end_and_takes_no_new_ones() -> None:
    with serving(drain_seconds=30) as server:
        connection = server.connect()
        connection.sendall(request_bytes(CHAT, chat(stream=True, max_tokens=60, min_tokens=60)))
        assert until(lambda: server.state.broker.num_open == 1)
        with server.paused(), server.connect() as scored:
            scored.sendall(request_bytes(COMPLETIONS, ECHO))
            assert until(lambda: server.state.broker.num_open == 2)
            server.loop.call_soon_threadsafe(server.server.stop)
            assert until(lambda: server.state.broker.draining)
            refused = post(server, CHAT, chat())
            ready = server.connect()
            ready.sendall(request_bytes("/ready", method="GET"))
            assert receive(ready).status == 503
            ready.close()
        whole = receive(connection)
        connection.close()

    assert refused.status == 503
    assert "shutting down" in refused.error["message"]
    assert events(whole)[-1]["choices"][0]["finish_reason"] == "length"


def test_requests_that_wait_or_take_too_long_end() -> None:
    with serving(slots=1, queue_seconds=0.2, request_seconds=0.4) as server:
        with server.paused():
            waited, scored = post(server, CHAT, chat()), post(server, COMPLETIONS, ECHO)
        connection = server.connect()
        connection.sendall(request_bytes(CHAT, chat(max_tokens=200, min_tokens=200)))
        assert until(lambda: server.server._worker._rows)
        with server.paused():
            ran = receive(connection)
        connection.close()

    assert (waited.status, scored.status, ran.status) == (503, 504, 504)
    assert "no slot was free for 0.2 seconds" in waited.error["message"]
    for late in (scored, ran):
        assert "the request took longer than 0.4 seconds" in late.error["message"]


def test_a_server_ends_when_generation_fails() -> None:
    with suppress(RuntimeError), serving() as server:  # the loop that would stop it is closed
        server.state.models["tiny"].batch.close()
        failed = post(server, CHAT, chat())
        assert until(server.loop.is_closed)

    assert failed.status == 500
    assert "generation has failed; the server is shutting down" in failed.error["message"]
