"""chat.py at a real terminal: a pseudo-terminal, with a person's keys sent to it."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference.conversation import GREETING

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120
PROMPT = "You: "
CTRL_C = "\x03"


class Chat:
    """chat.py in a new terminal."""

    def __init__(self, home: Path) -> None:
        self.ours, theirs = pty.openpty()
        self.shown = ""
        self._read_up_to = 0
        # The first process that opens it in a new session controls the terminal and gets Ctrl-C.
        opened = (
            "import os, runpy, sys; os.close(os.open(os.ttyname(0), os.O_RDWR));"
            " sys.argv[0] = 'chat.py'; runpy.run_path('chat.py', run_name='__main__')"
        )
        command = [sys.executable, "-c", opened, "--path", "embedded", "--seed", "1"]
        self.process = subprocess.Popen(
            [*command, "--temperature", "0"],
            cwd=ROOT,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "HOME": str(home)},
        )
        os.close(theirs)

    def type(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    def until(self, text: str) -> str:
        """Return the output from the last call up to `text`."""
        limit = time.monotonic() + SECONDS
        while (place := self.shown.find(text, self._read_up_to)) < 0:
            if time.monotonic() > limit or not self._read():
                raise AssertionError(f"no {text!r} after {self.shown[self._read_up_to :]!r}")
        begin, self._read_up_to = self._read_up_to, place + len(text)
        return self.shown[begin:place]

    def begin_anew(self, *, length: int) -> None:
        """Forget the dialogue; answers have `length` tokens at the most from now on."""
        self.type(f"/length {length}\n")
        self.until(PROMPT)
        self.type("/reset\n")
        self.until("(new dialogue)")
        self.until(PROMPT)

    def messages(self, file: Path) -> list[tuple[str, str]]:
        """The dialogue as it stands, by /save."""
        self.type(f"/save {file}\n")
        self.until("(saved ")
        self.until(PROMPT)
        return [(turn["role"], turn["content"]) for turn in json.loads(file.read_text())]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)

    def _read(self) -> bool:
        if not select.select([self.ours], [], [], 1.0)[0]:
            return self.process.poll() is None
        try:
            part = os.read(self.ours, 1 << 16)
        except OSError:  # the other side is closed
            return False
        # Without what steers the terminal.
        self.shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", part.decode()).replace("\r", "")
        return bool(part)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chat]:
    """A chat that waits at its prompt."""
    started = Chat(tmp_path_factory.mktemp("home"))
    assert GREETING in started.until(PROMPT)
    yield started
    started.close()


def test_ctrl_c_stops_the_answer_and_keeps_the_dialogue(chat: Chat, tmp_path: Path) -> None:
    chat.begin_anew(length=110)  # the model's context holds two such answers
    chat.type("Hi\n")
    chat.until("Model: ")
    chat.type(CTRL_C)
    answer = chat.until(PROMPT)

    said = chat.messages(tmp_path / "saved.json")

    assert "[stopped]" in answer
    assert [text for role, text in said if role == "user"] == ["Hi"]
