"""Access control and limits of requests, as documented in docs/serving.md."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from inference.serve.config import ServeConfig, read_keys
from pipeline.system.errors import ConfigError
from tests.inference.serve.serving import CHAT, LiveServer, chat, get, post, serving


@pytest.fixture(scope="module")
def keyed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# of the team\nanna first-secret\nsecond-secret\n")
    with serving(api_key_file=file) as running:
        yield running


def test_public_host_requires_a_key() -> None:
    for host in ("0.0.0.0", "192.0.2.1", "::"):
        with pytest.raises(ConfigError, match="lets other machines connect; pass --api-key-file"):
            read_keys(ServeConfig(path=("x",), host=host))

    assert read_keys(ServeConfig(path=("x",), host="::1")) == {}
    assert read_keys(ServeConfig(path=("x",), host="0.0.0.0", insecure_no_key=True)) == {}


def test_keys_are_read_from_options_environment_and_file(
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
    for content, message in (
        ("", "has no keys"),
        ("short\n", "shorter than 8"),
        ("a b c\n", "line 1 must be KEY or NAME KEY"),
        ("ключ-ключ\n", "characters that are invalid in"),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError, match=message):
            read_keys(ServeConfig(path=("x",), api_key_file=file))
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        read_keys(ServeConfig(path=("x",), api_key_file=tmp_path / "none"))


def test_all_routes_but_health_and_page_require_the_key(keyed_server: LiveServer) -> None:
    for path in ("/v1/models", "/ready", "/version", "/nothing"):
        assert get(keyed_server, path).status == 401
        assert get(keyed_server, path, Authorization="Bearer wrong-secret").status == 401
        assert get(keyed_server, path, Authorization="Basic second-secret").status == 401
        assert get(keyed_server, path, Authorization="Bearer second-secret").status != 401
    assert post(keyed_server, CHAT, chat()).status == 401
    for path in ("/health", "/"):
        assert get(keyed_server, path).status == 200


def test_keys_are_not_logged_or_returned(
    keyed_server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        response = get(keyed_server, "/v1/models", Authorization="Bearer first-secret")

    assert response.status == 200
    assert any("anna GET /v1/models 200" in record.getMessage() for record in caplog.records)
    assert "first-secret" not in caplog.text
    assert b"secret" not in response.body


def test_foreign_host_names_are_rejected(server: LiveServer) -> None:
    others = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::2]", "[", "a]")
    for host in others:
        assert get(server, "/v1/models", Host=host).status == 403
    for host in ("127.0.0.1", "localhost:8000", "[::1]:80"):
        assert get(server, "/v1/models", Host=host).status == 200


def test_foreign_origins_are_rejected(server: LiveServer) -> None:
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
        assert post(server, CHAT, chat(), Origin=origin).error["type"] == "permission_error"
    assert post(server, CHAT, chat(), **{"Sec-Fetch-Site": "cross-site"}).status == 403
    same_origin = {"Origin": "http://127.0.0.1"}
    assert post(server, CHAT, chat(max_tokens=1), **same_origin).status == 200
    assert "access-control-allow-origin" not in get(server, "/v1/models", **same_origin).headers
    # A content type that forms of other pages can send is rejected.
    plain = {"Content-Type": "text/plain"}
    assert post(server, CHAT, chat(), **plain).status == 415


def test_large_body_is_rejected_before_it_is_read() -> None:
    with serving(max_body_mib=0.01) as server:
        long = post(server, CHAT, chat("x" * 20_000))
        declared_long = post(server, CHAT, b"", **{"Content-Length": "9" * 14})
        chunks = b"1000\r\n" + b"a" * 4096 + b"\r\n"
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        with server.connect() as connection:
            connection.sendall(head + chunks * 4 + b"0\r\n\r\n")
            assert connection.recv(64).startswith(b"HTTP/1.1 413")

    assert long.status == declared_long.status == 413
