"""Requests that no client would send: an error of theirs each, none of the server's."""

import random
from typing import Any

import pytest

from tests.inference.serve.serving import (
    CHAT,
    COMPLETIONS,
    Running,
    chat,
    post,
    receive,
    request_bytes,
    serving,
    until,
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


def make_request(chance: random.Random) -> bytes:
    """A request that is right but for a few of its fields, or anything at all."""
    path = chance.choice(PATHS)
    if chance.random() < 0.1:
        return request_bytes(path, chance.choice(BODIES))
    body: dict[str, Any] = {"max_tokens": 1}
    if path == CHAT:
        body |= {"messages": [{"role": "user", "content": "Hi"}]}
    else:
        body |= {"prompt": "Hi"}
    for _ in range(chance.randrange(4)):
        body[chance.choice(FIELDS)] = chance.choice(VALUES)
    if chance.random() < 0.05:
        data = bytearray(request_bytes(path, body))
        for _ in range(3):
            data[chance.randrange(len(data))] = chance.randrange(256)
        return bytes(data)
    return request_bytes(path, body)


def check_requests(server: Running, count: int, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(count):
        data = make_request(chance)
        with server.connect() as connection:
            connection.settimeout(20)
            connection.sendall(data)
            connection.shutdown(1)  # what a lie about its length left out never comes
            answer = receive(connection)
        assert answer.status not in (500, 502), (data[:600], answer)
        if answer.status >= 400 and answer.headers.get("content-type") == "application/json":
            error = answer.error
            assert set(error) == {"message", "type", "param", "code"}
            assert "\n" not in error["message"]
            assert len(error["message"]) < 500


@pytest.fixture(scope="module")
def short() -> Any:
    """With few tokens, for what a request may ask for must not make the test long."""
    with serving(context=64, max_tokens_default=2, max_n=2, log_requests=False) as running:
        yield running


def test_no_request_is_an_error_of_the_server(short: Running) -> None:
    before = post(short, CHAT, chat(seed=1, max_tokens=4)).json["choices"]

    check_requests(short, 500, seed=1)

    assert post(short, CHAT, chat(seed=1, max_tokens=4)).json["choices"] == before
    assert until(short.is_idle)
