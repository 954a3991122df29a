"""Access control and limits of requests, as promised in docs/serving.md."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from inference.serve.config import ServeConfig, read_keys
from pipeline.system.errors import ConfigError
from tests.inference.serve.serving import CHAT, Running, chat, get, post, serving


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# of the team\nanna first-secret\nsecond-secret\n")
    with serving(api_key_file=file, cors=("https://friend.example",)) as running:
        yield running


def test_without_a_key_other_machines_are_not_let_in() -> None:
    for host in ("0.0.0.0", "192.0.2.1", "::"):
        with pytest.raises(ConfigError, match="accepts other machines; pass --api-key-file"):
            read_keys(ServeConfig(path=("x",), host=host))

    assert read_keys(ServeConfig(path=("x",), host="::1")) == {}
    assert read_keys(ServeConfig(path=("x",), host="0.0.0.0", insecure_no_key=True)) == {}


def test_keys_come_from_the_command_line_the_environment_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("anna abcdefgh\n\nijklmnop\n")
    monkeypatch.setenv("RLHF_API_KEY", "qrstuvwx")

    keys = read_keys(ServeConfig(path=("x",), api_key=("12345678",), api_key_file=file))

    assert keys == {
        "key 1": "12345678",
        "key 2": "qrstuvwx",
        "anna": "abcdefgh",
        "keys line 3": "ijklmnop",
    }
    for content, sentence in (
        ("", "has no keys"),
        ("short\n", "shorter than 8"),
        ("a b c\n", "line 1 must be KEY or NAME KEY"),
        ("ключ-ключ\n", "characters that headers forbid"),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError, match=sentence):
            read_keys(ServeConfig(path=("x",), api_key_file=file))
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        read_keys(ServeConfig(path=("x",), api_key_file=tmp_path / "none"))


def test_every_route_but_health_and_the_pages_files_needs_the_key(keyed: Running) -> None:
    for path in ("/v1/models", "/metrics", "/ready", "/version", "/nothing"):
        assert get(keyed, path).status == 401
        assert get(keyed, path, Authorization="Bearer wrong-secret").status == 401
        assert get(keyed, path, Authorization="Basic second-secret").status == 401
        assert get(keyed, path, Authorization="Bearer second-secret").status != 401
    assert post(keyed, CHAT, chat()).status == 401
    for path in ("/health", "/"):
        assert get(keyed, path).status == 200


def test_a_key_is_in_no_log_and_no_response(
    keyed: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        answer = get(keyed, "/v1/models", Authorization="Bearer first-secret")

    assert answer.status == 200
    assert any("anna GET /v1/models 200" in record.getMessage() for record in caplog.records)
    assert "first-secret" not in caplog.text
    assert b"secret" not in answer.body


def test_a_name_that_was_bound_to_this_machine_does_not_lead_in(server: Running) -> None:
    others = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::2]", "[", "a]")
    for host in others:
        assert get(server, "/v1/models", Host=host).status == 403
    for host in ("127.0.0.1", "localhost:8000", "[::1]:80"):
        assert get(server, "/v1/models", Host=host).status == 200


def test_another_page_can_not_ask(server: Running) -> None:
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
        assert post(server, CHAT, chat(), Origin=origin).status == 403
    assert post(server, CHAT, chat(), **{"Sec-Fetch-Site": "cross-site"}).status == 403
    own = {"Origin": "http://127.0.0.1"}
    assert post(server, CHAT, chat(max_tokens=1), **own).status == 200
    assert "access-control-allow-origin" not in get(server, "/v1/models", **own).headers
    # What a form or a plain request of another page could send is not read.
    plain = {"Content-Type": "text/plain"}
    assert post(server, CHAT, chat(), **plain).status == 415


def test_a_body_is_refused_before_it_is_read_whole() -> None:
    with serving(max_body_mib=0.01) as server:
        long = post(server, CHAT, chat("x" * 20_000))
        lied = post(server, CHAT, b"", **{"Content-Length": "9" * 14})
        chunks = b"1000\r\n" + b"a" * 4096 + b"\r\n"
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        with server.connect() as connection:
            connection.sendall(head + chunks * 4 + b"0\r\n\r\n")
            assert connection.recv(64).startswith(b"HTTP/1.1 413")

    assert long.status == lied.status == 413
