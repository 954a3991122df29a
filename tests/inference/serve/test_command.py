"""The command: error messages, the models of a run, and a process that is stopped."""

import contextlib
import ctypes
import fcntl
import io
import json
import os
import re
import socket
import struct
import time
from collections.abc import Sequence
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest

from inference.serve.command import _open_ratings, main
from inference.serve.config import ServeConfig
from inference.serve.models import ModelPath, collect_models, find_run_models, find_run_reward
from pipeline.cli.options import run_main
from tests.commands import start_command
from tests.distributed import PROCESSES
from tests.inference.serve.serving import CHAT, chat, post, request_bytes, serving


def run_rejected(*argv: str) -> str:
    """Return the one-sentence error of a command line that exits with code 2."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), pytest.raises(SystemExit) as exit_info:
        run_main(main, argv)
    assert exit_info.value.code == 2, stderr.getvalue()
    (line,) = stderr.getvalue().splitlines()
    return line


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "error: --path is missing: pass a model directory, or --run OUT"),
        (("--path", "./none"), "error: no such model"),
        (("--path", "a=x", "--path", "a=y"), "error: --path: two models are called a; rename one"),
        (("--run", "none"), "error: --run none: no such directory"),
        (("--path", "embedded", "--prot", "1"), "error: there is no option --prot; did you mean"),
        (
            ("--path", "embedded", "--port", "70000"),
            "error: --port must be in [0, 65535], got 70000",
        ),
        (("--path", "embedded", "--slots", "0"), "error: --slots must be positive, got 0"),
        (("--path", "embedded", "--host", "0.0.0.0"), "error: --host 0.0.0.0 lets other"),
        (("--path", "embedded", "--api-key", "a"), "error: --api-key: key 1 is shorter than 8"),
        (("--path", "embedded", "--api-key-file", "no"), "error: --api-key-file no can't be read"),
        (
            ("--path", "embedded", "--port", "0", "--context", "257"),
            "error: --context 257 exceeds the 256-token context of embedded; lower it",
        ),
        (
            ("--path", "embedded", "--port", "0", "--cache-gib", "0.0001"),
            "error: the keys and values of embedded take",
        ),
        (
            ("--path", "embedded", "--port", "0", "--reward", "embedded"),
            "error: the embedded model can't be used",
        ),
        (("--path", "embedded", "--host", "203.0.113.7", "--insecure-no-key"), "error: --host 2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_invalid_options_print_one_sentence(
    argv: Sequence[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert run_rejected(*argv).startswith(message)


def test_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        line = run_rejected("--path", "embedded", "--port", str(port))

    assert line == (
        f"error: --port {port} on 127.0.0.1 is in use; choose another, or use --port 0 for any free"
        " port"
    )


def test_models_of_a_run_are_listed_with_the_best_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the name of the directory is the name of the model "."
    for name, score in (("step1_sft", None), ("step3_dpo", 2), ("step3_grpo", 1)):
        figure = "perplexity_after" if score is None else "win_rate"
        exported = {"eval_by_prompt": {"exported": {"score": [score]}}}
        directory = tmp_path / name if score is None else tmp_path / name / "actor"
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(exported))
        (tmp_path / name / "result.json").write_text(f'{{"seconds": 1, "eval": {{"{figure}": 2}}}}')
    (tmp_path / "step1_sft" / "config.yaml").write_text("model: {path: base/dir}\nseed: 4\n")

    models = find_run_models(tmp_path)

    sft = str(tmp_path / "step1_sft")
    assert models == [
        ModelPath("base", "base/dir", 4, sft),
        ModelPath("step1_sft", sft),
        ModelPath("step3_grpo", str(tmp_path / "step3_grpo" / "actor")),
        ModelPath("step3_dpo", str(tmp_path / "step3_dpo" / "actor")),
    ]
    config = ServeConfig(run=tmp_path, path=("one=a", "b/actor", "b/ema", "."))
    others = {"one": "a", "b": "b/actor", "b-ema": "b/ema", Path.cwd().name: "."}
    assert collect_models(config) == [*models, *(ModelPath(*item) for item in others.items())]


def test_reward_model_of_a_run_is_that_of_a_finished_step2(tmp_path: Path) -> None:
    for name, figure in (("step1_sft", "perplexity_after"), ("step2_reward", "accuracy_after")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1}')
        files = {"result.json": f'{{"seconds": 1, "eval": {{"{figure}": 1}}}}', "config.json": "{}"}
        for file, text in files.items():
            assert find_run_reward(tmp_path) is None
            (tmp_path / name / file).write_text(text)

    assert find_run_reward(tmp_path) == str(tmp_path / "step2_reward")
    (tmp_path / "step2_reward" / "result.json").unlink()
    assert find_run_reward(tmp_path) is None


def test_ratings_are_saved_to_the_named_file_or_to_the_run(tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "a.jsonl"
    for settings, expected in (
        ({}, None),
        ({"run": run}, run / "ratings.jsonl"),
        ({"ratings": file}, file),
        ({"run": run, "ratings": file}, file),
    ):
        ratings = _open_ratings(ServeConfig(path=("a",), **settings))
        assert (ratings and ratings.path) == expected


@pytest.mark.jobs
def test_stopped_process_finishes_its_running_requests(tmp_path: Path) -> None:
    out, errors = (tmp_path / "streams" / name for name in ("out", "err"))
    command = "-m inference.serve --path tiny=embedded --port 0 --slots 2"
    process = start_command(*command.split(), streams=out.parent, env=os.environ)
    while not (out.exists() and "\n" in out.read_text()):
        assert process.is_alive()
        time.sleep(0.05)
    match = re.match(r"http://127.0.0.1:(\d+) : page and API", out.read_text())
    assert match
    with socket.create_connection(("127.0.0.1", int(match[1])), timeout=60) as connection:
        body = chat(stream=True, max_tokens=150, min_tokens=150)
        connection.sendall(request_bytes(CHAT, body))
        first = connection.recv(100)
        process.terminate()
        rest = receive_after(first, connection)
    process.join(timeout=60)

    assert process.exitcode == 0
    assert "shutting down once running requests finish" in errors.read_text()
    assert rest.count(b'finish_reason":"length') == 1
    assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def receive_after(first: bytes, connection: socket.socket) -> bytes:
    chunks = [first]
    while chunk := connection.recv(65536):
        chunks.append(chunk)
    return b"".join(chunks)


def serve_offline(results: SimpleQueue[int | str]) -> None:
    """Serve in a network namespace that has only a loopback."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        results.put(os.strerror(ctypes.get_errno()))
        return
    with socket.socket() as loopback:  # ip link set lo up
        fcntl.ioctl(loopback, 0x8914, struct.pack("16sH14s", b"lo", 0x1 | 0x40, b""))
    with pytest.raises(OSError, match="unreachable"):
        socket.create_connection(("203.0.113.1", 80), timeout=1)
    with serving() as server:
        results.put(post(server, CHAT, chat(max_tokens=2)).status)


CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000


def test_server_needs_no_network() -> None:
    """The server works without a network."""
    results: SimpleQueue[int | str] = PROCESSES.SimpleQueue()
    process = PROCESSES.Process(target=serve_offline, args=(results,), daemon=True)
    process.start()
    process.join(60)

    assert process.exitcode == 0
    if isinstance(result := results.get(), str):
        pytest.skip(f"this system allows no network namespace: {result}")
    assert result == 200
