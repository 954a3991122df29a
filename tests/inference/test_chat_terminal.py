"""chat.py in a pseudo-terminal, with keys sent to it."""

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
        self.descriptor, terminal = pty.openpty()
        self.output = ""
        self._position = 0
        # The first process of the new session that opens the terminal receives Ctrl-C from it.
        program = (
            "import os, runpy, sys; os.close(os.open(os.ttyname(0), os.O_RDWR));"
            " sys.argv[0] = 'chat.py'; runpy.run_path('chat.py', run_name='__main__')"
        )
        command = [sys.executable, "-c", program, "--path", "embedded", "--seed", "1"]
        self.process = subprocess.Popen(
            [*command, "--temperature", "0"],
            cwd=ROOT,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "HOME": str(home)},
        )
        os.close(terminal)

    def type(self, keys: str) -> None:
        os.write(self.descriptor, keys.encode())

    def read_until(self, text: str) -> str:
        """Return the output from the last call up to `text`."""
        deadline = time.monotonic() + SECONDS
        while (index := self.output.find(text, self._position)) < 0:
            if time.monotonic() > deadline or not self._read():
                raise AssertionError(f"no {text!r} after {self.output[self._position :]!r}")
        start, self._position = self._position, index + len(text)
        return self.output[start:index]

    def start_dialogue(self, *, length: int) -> None:
        """Start a new dialogue, with answers of at most `length` tokens."""
        self.type(f"/length {length}\n")
        self.read_until(PROMPT)
        self.type("/reset\n")
        self.read_until("(new dialogue)")
        self.read_until(PROMPT)

    def messages(self, file: Path) -> list[tuple[str, str]]:
        """Return the current dialogue, from /save."""
        self.type(f"/save {file}\n")
        self.read_until("(saved ")
        self.read_until(PROMPT)
        return [(turn["role"], turn["content"]) for turn in json.loads(file.read_text())]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.descriptor)

    def _read(self) -> bool:
        if not select.select([self.descriptor], [], [], 1.0)[0]:
            return self.process.poll() is None
        try:
            chunk = os.read(self.descriptor, 1 << 16)
        except OSError:  # the other end is closed
            return False
        # Remove terminal control sequences.
        self.output += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", chunk.decode()).replace("\r", "")
        return bool(chunk)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chat]:
    """A chat that waits at its prompt."""
    terminal = Chat(tmp_path_factory.mktemp("home"))
    assert GREETING in terminal.read_until(PROMPT)
    yield terminal
    terminal.close()


def test_ctrl_c_stops_the_response_and_keeps_the_dialogue(chat: Chat, tmp_path: Path) -> None:
    chat.start_dialogue(length=110)  # two such answers fit in the model's context
    chat.type("Hi\n")
    chat.read_until("Model: ")
    chat.type(CTRL_C)
    response = chat.read_until(PROMPT)

    messages = chat.messages(tmp_path / "saved.json")

    assert "[stopped]" in response
    assert [text for role, text in messages if role == "user"] == ["Hi"]
