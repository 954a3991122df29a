"""rewards/endpoint.py and judge.py, with real servers on loopback."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pipeline.data.examples import Message
from rewards.config import RewardConfig
from rewards.contract import Episode, Outcome
from rewards.judge import NoScoreError, parse_score, reply_text
from rewards.sources import make_scorer, read_source


@dataclass
class Server:
    """A test server: how it answers, and the requests it received."""

    answer: Callable[["Server", BaseHTTPRequestHandler, Any], None]
    url: str = ""
    requests: list[Any] = field(default_factory=list)


def respond(
    handler: BaseHTTPRequestHandler, body: object, status: int = 200, **headers: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


@contextmanager
def run_server(answer: Callable[[Server, BaseHTTPRequestHandler, Any], None]) -> Iterator[Server]:
    state = Server(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.requests.append(body)
            # The client may have given up, as it should.
            with suppress(BrokenPipeError, ConnectionResetError):
                state.answer(state, self, body)

        def log_message(self, *args: object) -> None:
            del args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def judge_reply(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def make_episodes(*responses: str, **extra: object) -> list[Episode]:
    prompt = (Message("user", "2 + 2?"),)
    return [Episode(prompt, text, extra=extra, slot=n) for n, text in enumerate(responses)]


def score(config: RewardConfig, episodes: list[Episode], *, seconds: float = 5.0) -> list[Outcome]:
    source = read_source(config, timeout_seconds=seconds)
    return make_scorer(source)(episodes)


def test_remote_service_receives_openrlhf_format_and_null_means_no_reward() -> None:
    with run_server(lambda _s, handler, _b: respond(handler, {"rewards": [0.5, None]})) as server:
        config = RewardConfig(name="far", kind="remote", path=f"{server.url}/score?x=1")
        outcomes = score(config, make_episodes("4", "5", label="four"))

    assert outcomes == [Outcome(0.5), Outcome(None)]
    assert server.requests == [
        {"query": ["2 + 2?4", "2 + 2?5"], "prompts": ["2 + 2?"] * 2, "labels": ["four"] * 2}
    ]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"rewards": [1.0]}, "it returned 1 results for 2 responses"),
        ({"scores": [1.0, 2.0]}, "it returned dict"),
        ({"rewards": ["1", "1"]}, "it returned str '1' instead of a number or None"),
        (b"<html>", "returned invalid JSON: <html>"),
        (b"[" * 10_000, "returned invalid JSON: [["),
        (b'{"rewards": [NaN, NaN]}', "it returned nan, which is not finite in fp32"),
    ],
)
def test_invalid_reply_fails_all_episodes(reply: object, message: str) -> None:
    with run_server(lambda _s, handler, _b: respond(handler, reply)) as server:
        config = RewardConfig(name="far", kind="remote", path=server.url)
        outcomes = score(config, make_episodes("4", "5"))

    assert all(o.value is None and message in str(o.failure) for o in outcomes)
    assert len(server.requests) == 1


def test_busy_server_is_retried_after_its_retry_after() -> None:
    def answer(server: Server, handler: BaseHTTPRequestHandler, _body: Any) -> None:
        if len(server.requests) < 3:
            respond(handler, {}, 429, Retry_After="0.2")
        else:
            respond(handler, {"rewards": [1.0]})

    with run_server(answer) as server:
        config = RewardConfig(name="far", kind="remote", path=server.url)
        start = time.monotonic()
        outcomes = score(config, make_episodes("4"))
        seconds = time.monotonic() - start

    assert outcomes == [Outcome(1.0)]
    assert len(server.requests) == 3
    assert 0.4 <= seconds < 1.5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"score": 10}', 1.0),
        ('{"score": 1} no: ```json\n{"score": 5, "why": "x"}\n```', 0.5),
        ('{"result": {"score": 2.5}} {"note": "done"}', 0.25),
        ('in {x} {"why": "{1, 2}", "score": 4, "parts": {"score": 9}}', 0.4),
        ('{"score": 11}', "the judge's score 11 is not between 0 and 10"),
        ('{"score": 1' + "0" * 400 + "}", "the judge's score 10+ is not between 0 and 10"),
        ('{"score": ' + "[" * 10_000 + "}", "no JSON object with a score"),
        ('{"score": "9"}', "no JSON object with a score"),
        ('{"score": true}', "no JSON object with a score"),
        ("9/10", "no JSON object with a score"),
        ("", "no JSON object with a score"),
    ],
)
def test_judge_reply_is_parsed_to_a_score_or_raises(text: str, expected: float | str) -> None:
    if isinstance(expected, float):
        assert parse_score(reply_text(judge_reply(text)), (0.0, 10.0)) == expected
    else:
        with pytest.raises(NoScoreError, match=expected):
            parse_score(reply_text(judge_reply(text)), (0.0, 10.0))
