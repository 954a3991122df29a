"""rewards/endpoint.py, remote.py, judge.py: real servers on loopback, well and badly behaved."""

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
from rewards.judge import NoScoreError, score_in, text_of
from rewards.sources import read_source, scorer_of


@dataclass
class Server:
    """Requests that a server received, and its responses."""

    answer: Callable[["Server", BaseHTTPRequestHandler, Any], None]
    url: str = ""
    asked: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Counts the requests at work; it ends before the answer, after which the next may come."""
        with self.lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        yield
        with self.lock:
            self.at_once -= 1


def say(handler: BaseHTTPRequestHandler, body: object, status: int = 200, **headers: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


@contextmanager
def serving(answer: Callable[[Server, BaseHTTPRequestHandler, Any], None]) -> Iterator[Server]:
    known = Server(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with known.lock:
                known.asked.append(body)
                known.headers.append(dict(self.headers))
            # The client may have given up, as it should.
            with suppress(BrokenPipeError, ConnectionResetError):
                known.answer(known, self, body)

        def log_message(self, *args: object) -> None:
            del args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    known.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield known
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def judged(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def episodes(*responses: str, **extra: object) -> list[Episode]:
    prompt = (Message("user", "2 + 2?"),)
    return [Episode(prompt, each, extra=extra, slot=n) for n, each in enumerate(responses)]


def judge(server: Server, **settings: Any) -> RewardConfig:
    return RewardConfig(name="taste", kind="judge", path=f"{server.url}/v1", model="m", **settings)


def scored(config: RewardConfig, given: list[Episode], *, seconds: float = 5.0) -> list[Outcome]:
    source = read_source(config, timeout_seconds=seconds)
    return scorer_of(source)(given)


def test_a_service_gets_openrlhfs_form_and_its_null_is_no_reward() -> None:
    with serving(lambda _s, handler, _b: say(handler, {"rewards": [0.5, None]})) as server:
        config = RewardConfig(name="far", kind="remote", path=f"{server.url}/score?x=1")
        outcomes = scored(config, episodes("4", "5", label="four"))

    assert outcomes == [Outcome(0.5), Outcome(None)]
    assert server.asked == [
        {"query": ["2 + 2?4", "2 + 2?5"], "prompts": ["2 + 2?"] * 2, "labels": ["four"] * 2}
    ]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ({"rewards": [1.0]}, "it returned 1 results for 2 responses"),
        ({"scores": [1.0, 2.0]}, "it returned dict"),
        ({"rewards": ["1", "1"]}, "it returned str '1' instead of a number or None"),
        (b"<html>", "returned invalid JSON: <html>"),
        (b'{"rewards": [NaN, NaN]}', "it returned nan, which is not finite"),
    ],
)
def test_a_service_that_lies_has_failed(answer: object, sentence: str) -> None:
    with serving(lambda _s, handler, _b: say(handler, answer)) as server:
        config = RewardConfig(name="far", kind="remote", path=server.url)
        outcomes = scored(config, episodes("4", "5"))

    assert all(each.value is None and sentence in str(each.failure) for each in outcomes)
    assert len(server.asked) == 1


def test_a_busy_server_is_asked_again_after_the_time_that_it_names() -> None:
    def answer(server: Server, handler: BaseHTTPRequestHandler, _body: Any) -> None:
        if len(server.asked) < 3:
            say(handler, {}, 429, Retry_After="0.2")
        else:
            say(handler, {"rewards": [1.0]})

    with serving(answer) as server:
        config = RewardConfig(name="far", kind="remote", path=server.url)
        began = time.monotonic()
        outcomes = scored(config, episodes("4"))
        seconds = time.monotonic() - began

    assert outcomes == [Outcome(1.0)]
    assert len(server.asked) == 3
    assert 0.4 <= seconds < 1.5


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"score": 10}', 1.0),
        ('{"score": 1} no: ```json\n{"score": 5, "why": "x"}\n```', 0.5),
        ('{"score": 2.5} {"note": "done"}', 0.25),
        ('{"score": 11}', "the judge returned 11, outside 0 to 10"),
        ('{"score": "9"}', "no JSON with a score"),
        ('{"score": true}', "no JSON with a score"),
        ("9/10", "no JSON with a score"),
        ("", "no JSON with a score"),
    ],
)
def test_a_judges_answer_without_a_score_on_its_scale_is_a_failure(
    text: str, score: float | str
) -> None:
    if isinstance(score, float):
        assert score_in(text_of(judged(text)), (0.0, 10.0)) == score
    else:
        with pytest.raises(NoScoreError, match=score):
            score_in(text_of(judged(text)), (0.0, 10.0))
