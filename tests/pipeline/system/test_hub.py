"""Errors when the Hub can't be reached."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.system.errors import ModelError
from pipeline.system.hub import PROXIES, require_reachable, unreachable_reason
from tests.commands import run_command


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A server at the Hub's address, which accepts connections until it is closed."""
    for name in (*PROXIES, "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield server


def test_unreachable_hub_raises_with_the_reason(listening: socket.socket) -> None:
    listening.close()

    assert unreachable_reason() == "127.0.0.1 can't be reached: Connection refused"
    with pytest.raises(ModelError, match=r"^no a/b \(127.0.0.1 can't be .*\); check .* or use c$"):
        require_reachable("no a/b", ModelError, alternative="c")


@pytest.mark.parametrize(
    ("option", "error"),
    [
        (
            ("--data-path", "no/data"),
            "data path no/data is neither a local file or directory nor in the Hub's cache"
            " (127.0.0.1 can't be reached: Connection refused); check the name and the connection,"
            " or use a local file",
        ),
        (
            ("--actor-model", "no/model", "--data-path", "embedded"),
            "no such model: no/model is neither a local model directory nor in the Hub's cache"
            " (127.0.0.1 can't be reached: Connection refused); check the name and the connection,"
            " or use a directory",
        ),
    ],
)
def test_unknown_names_fail_immediately_without_a_network(
    listening: socket.socket, tmp_path: Path, option: tuple[str, ...], error: str
) -> None:
    listening.close()
    argv = (*option, "--output-dir", tmp_path / "out")

    result = run_command("train.py", *map(str, argv))

    assert result.returncode == 2
    assert result.stderr.splitlines() == [f"error: {error}"]
