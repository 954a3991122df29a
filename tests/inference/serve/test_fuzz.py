"""Random invalid requests cause client errors, but no server errors."""

import random
from typing import Any

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
    wait_until,
)

BODIES: tuple[bytes, ...] = (
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"{",
    b"\xff\xfe{}",
    b"\xef\xbb\xbf{}",
    b"{}" * 2,
    b"[" * 10_000,
    b'{"messages":' * 100,
    b'{"a":"' + b'\\"' * 100_000,
    b'{"temperature": NaN}',
    b'{"temperature": 1e400}',
    b'{"temperature": -Infinity}',
    b'{"seed": ' + b"9" * 5000 + b"}",
    b'{"messages": [], "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "\\u0000"}], "max_tokens": 1}',
    (b'{"prompt": "x", "stop": [' + b'"a", ' * 400_000)[:1_900_000],
    b'{"prompt": "x", "stop": [' + b'"a", ' * 300_000 + b'"a"]}',
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, 2**31, 2**63, -(2**63), 2**64, 10**40),
    *("", "x", "user", "tiny", "\x00", "\ufffd", "🦉", "a" * 3000, "<s></s>", "../../etc/passwd"),
    *([], [[]], [0], [1, 2, 3], [[1], [2, 3]], ["a", ""], [None], [{}], [-1], [10**9], ["a", 1]),
    *({}, {"type": "text"}, {"a": {"b": 1}}, {"70": 1}, {"70": 101}, {"-1": 1}, {"x": 1}),
    *("(", "a+", "\ud800", {"type": "json_object"}, {"type": "json_schema"}),
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": ["\ud800"]}}},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    *("required", {"type": "function", "function": {"name": "f"}}),
    *({"eos_token": "a"}, {"message": True}, {"if": "x"}),
    [{"role": "user", "content": "Hi"}],
    [{"role": "assistant", "content": "Hi"}],
    [{"role": "tool", "content": "Hi"}],
    [{"role": "system", "content": ""}],
    [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": "Hi"}] * 3,
)
FIELDS = (
    *("model", "messages", "prompt", "temperature", "top_p", "top_k", "min_p", "n", "stop"),
    *("stream", "stream_options", "seed", "max_tokens", "max_completion_tokens", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "user"),
    *("logprobs", "top_logprobs", "echo", "best_of", "suffix", "tools", "response_format", "regex"),
    *("return_token_ids", "continue_final_message", "add_generation_prompt", "unknown"),
    *("tokens", "add_special_tokens", "chat_template", "chat_template_kwargs"),
    *("tool_choice", "parallel_tool_calls"),
)
PATHS = (CHAT, CHAT, COMPLETIONS, COMPLETIONS, "/tokenize", "/v1/score")


def make_request(rng: random.Random) -> bytes:
    """Return a request with a few random fields, or with a random body."""
    path = rng.choice(PATHS)
    if rng.random() < 0.1:
        return request_bytes(path, rng.choice(BODIES))
    body: dict[str, Any] = {"max_tokens": 1}
    if path == CHAT:
        body |= {"messages": [{"role": "user", "content": "Hi"}]}
    else:
        body |= {"prompt": "Hi"}
    for _ in range(rng.randrange(4)):
        body[rng.choice(FIELDS)] = rng.choice(VALUES)
    if rng.random() < 0.05:
        data = bytearray(request_bytes(path, body))
        for _ in range(3):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data)
    return request_bytes(path, body)


def send_random_requests(server: LiveServer, count: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        data = make_request(rng)
        with server.connect() as connection:
            connection.settimeout(20)
            connection.sendall(data)
            connection.shutdown(1)  # a wrong length must not make the server wait
            response = receive(connection)
        assert response.status not in (500, 502), (data[:600], response)
        if response.status >= 400 and response.headers.get("content-type") == "application/json":
            error = response.error
            assert set(error) == {"message", "type", "param", "code"}
            assert "\n" not in error["message"]
            assert len(error["message"]) < 500


@pytest.fixture(scope="module")
def short_server() -> Any:
    """A server that generates few tokens, so that no request takes long."""
    with serving(context=64, max_tokens_default=2, max_n=2, log_requests=False) as running:
        yield running


def test_random_requests_cause_no_server_errors(short_server: LiveServer) -> None:
    before = post(short_server, CHAT, chat(seed=1, max_tokens=4)).json["choices"]

    send_random_requests(short_server, 500, seed=1)

    assert post(short_server, CHAT, chat(seed=1, max_tokens=4)).json["choices"] == before
    assert wait_until(short_server.is_idle)
