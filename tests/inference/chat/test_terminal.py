"""The chat's terminal."""

import contextlib
import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from inference.chat.conversation import Conversation
from inference.chat.terminal import Terminal

ROOT = Path(__file__).resolve().parents[3]
Type = Callable[..., list[str]]


@pytest.fixture
def conversation(converse: Callable[..., Conversation]) -> Conversation:
    return converse(temperature=0.0, max_new_tokens=3)


@pytest.fixture
def enter(
    conversation: Conversation,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Type:
    """Enters lines through a pipe; returns the lines that were printed."""

    def run(*lines: str) -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        Terminal(conversation).run()
        return capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize("quit_line", ["/quit", "quit", "QUIT", "exit"])
def test_quit_ends_the_chat(enter: Type, quit_line: str, conversation: Conversation) -> None:
    assert enter(quit_line, "Hi") == []
    assert conversation.messages == []


def test_temperature_and_length_change_the_sampling(
    enter: Type, conversation: Conversation
) -> None:
    printed = enter("/temperature 0.5", "/length 7")

    assert printed == ["(temperature 0.5)", "(max_new_tokens 7)"]
    assert conversation.sampling.temperature == 0.5
    assert conversation.sampling.max_new_tokens == 7


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("/temperature hot", "(temperature takes a number, not 'hot')"),
        ("/temperature -1", "(temperature must be 0 or above, got -1.0)"),
        ("/length 1.5", "(max_new_tokens takes a whole number, not '1.5')"),
        ("/length 0", "(max_new_tokens must be above 0, got 0)"),
        ("/save", "(/save needs a file name)"),
        ("/save /nowhere/at/all.json", "(/nowhere/at/all.json can't be written:"),
        ("/jump", "There is no command /jump; /help lists them."),
    ],
)
def test_a_wrong_command_says_what_is_wrong_and_changes_nothing(
    enter: Type, conversation: Conversation, line: str, answer: str
) -> None:
    before = conversation.sampling

    (printed,) = enter(line)

    assert printed.startswith(answer)
    assert conversation.sampling == before


def test_save_writes_the_messages_again_and_again_but_over_no_other_file(
    enter: Type, conversation: Conversation, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("precious")

    printed = enter(
        "/system Be kind.",
        f"/save {tmp_path / 'chat.json'}",
        "Hi",
        f"/save {tmp_path / 'chat.json'}",
        f"/save {tmp_path / 'mine.txt'}",
    )

    saved = json.loads((tmp_path / "chat.json").read_text())
    assert saved == [{"role": m.role, "content": m.content} for m in conversation.messages]
    assert [turn["role"] for turn in saved] == ["system", "user", "assistant"]
    assert (tmp_path / "mine.txt").read_text() == "precious"
    assert printed[-1].endswith("mine.txt exists; choose another name)")


@pytest.mark.jobs
def test_piped_lines_are_answered_and_the_command_succeeds() -> None:
    done = subprocess.run(
        [sys.executable, "chat.py", "--path", "embedded", "--max-new-tokens", "3", "--seed", "1"],
        cwd=ROOT,
        input="hi\nquit\n",
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0
    assert done.stdout.strip()
    assert "You:" not in done.stdout


def test_a_message_stays_where_ctrl_c_comes_before_its_answer_begins(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the model's name on the screen and the first token."""
    terminal = Terminal(conversation)
    terminal.interactive = True
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(Terminal, "write", lambda *_: signal.raise_signal(signal.SIGINT))
    with contextlib.suppress(KeyboardInterrupt):
        terminal.respond("Hi")
    signal.signal(signal.SIGINT, before)

    assert [(m.role, m.content) for m in conversation.messages] == [
        ("user", "Hi"),
        ("assistant", ""),
    ]
