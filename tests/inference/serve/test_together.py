"""Two processes that compute a model together: one answers, the other follows."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil
import pytest

from tests.inference.serve.serving import CHAT, COMPLETIONS, chat, post, serving

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parent.parent.parent.parent
TEXT = "What is 2 plus 2? It is"


@dataclass
class Job:
    """A server of several processes."""

    launcher: subprocess.Popen[str]
    port: int

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(body).encode()
        request = Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urlopen(request, timeout=60) as response:
            return json.load(response)

    def process(self, rank: int) -> psutil.Process:
        ranks = psutil.Process(self.launcher.pid).children()
        return next(each for each in ranks if each.environ()["RANK"] == str(rank))

    def ended(self) -> tuple[int, str]:
        """Its exit code and standard error."""
        errors = self.launcher.communicate(timeout=60)[1]
        return self.launcher.returncode, errors


def command(processes: int, *words: str) -> list[str]:
    launcher = f"pipeline.launch.torchrun --standalone --nproc-per-node {processes}"
    return [sys.executable, "-m", *launcher.split(), "-m", "inference.serve", *words]


@contextmanager
def together(*words: str) -> Iterator[Job]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    words = ("--path", "tiny=embedded", "--port", "0", "--slots", "4", *words)
    with subprocess.Popen(command(2, *words), cwd=ROOT, **pipes) as launcher:
        try:
            assert launcher.stdout is not None
            found = re.search(r":(\d+) :", launcher.stdout.readline())
            assert found is not None, launcher.communicate()
            yield Job(launcher, int(found[1]))
        finally:
            if launcher.poll() is None:
                launcher.kill()


def ids_of(answer: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


@pytest.mark.serve
def test_two_processes_answer_as_one_does_and_end_when_asked_to() -> None:
    fields = {"seed": 3, "max_tokens": 12, "return_token_ids": True}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, chat(n=3, **fields)),
        (COMPLETIONS, {"prompt": [TEXT, "7"], **fields}),
        (COMPLETIONS, {"prompt": TEXT, "regex": "[a-z]{3} [0-9]+", **fields}),
    ]
    scored = {"prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 1}
    with serving() as alone:
        expected = [ids_of(post(alone, *each).json) for each in bodies]
        scores = post(alone, COMPLETIONS, scored).json["choices"][0]["logprobs"]
        print_of = post(alone, *bodies[0]).json["system_fingerprint"]

    with together() as job:
        answers = [job.post(*each) for each in bodies]
        time.sleep(7)  # nobody asks anything for longer than the first process is silent
        found = job.post(COMPLETIONS, scored)["choices"][0]["logprobs"]
        job.process(0).send_signal(signal.SIGTERM)
        ended, errors = job.ended()

    assert [ids_of(each) for each in answers] == expected
    assert answers[0]["system_fingerprint"] == print_of
    assert found["tokens"] == scores["tokens"]
    assert found["token_logprobs"][1:] == pytest.approx(scores["token_logprobs"][1:], abs=1e-4)
    assert "Traceback" not in errors
    assert ended == 0, errors


@pytest.mark.serve
def test_a_process_that_is_killed_ends_the_server_in_a_sentence() -> None:
    with together() as job:
        job.post(CHAT, chat(max_tokens=2))
        job.process(1).kill()
        ended, errors = job.ended()

    assert ended != 0
    assert "Traceback" not in errors
    assert "rank 1 ended without a word" in errors


@pytest.mark.serve
def test_what_processes_can_not_divide_is_a_sentence() -> None:
    for processes, words, sentence in (
        (
            2,
            ("--path", "embedded", "--adapter", "a=."),
            "error: --adapter isn't served by several processes: merge",
        ),
        (2, ("--watch", "."), "error: several processes divide models among them"),
        (3, ("--path", "embedded"), "error: embedded: --nproc-per-node 3 doesn't divide"),
    ):
        line = command(processes, "--port", "0", *words)
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)

        assert done.returncode != 0
        assert "Traceback" not in done.stderr
        assert sentence in done.stderr, done.stderr
