"""The chat's terminal."""

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from inference.conversation import HELP, Conversation, Terminal
from tests.commands import run_command

Type = Callable[..., list[str]]


@pytest.fixture
def conversation(converse: Callable[..., Conversation]) -> Conversation:
    return converse(temperature=0.0, max_new_tokens=3)


@pytest.fixture
def enter(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Type:
    """Enters lines through a pipe; returns the lines that were printed."""

    def run(*lines: str) -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        Terminal(conversation).run()
        return capsys.readouterr().out.splitlines()

    return run


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
        f"/save {tmp_path / 'none' / 'chat.json'}",
    )

    saved = json.loads((tmp_path / "chat.json").read_text())
    assert saved == [{"role": m.role, "content": m.content} for m in conversation.messages]
    assert [turn["role"] for turn in saved] == ["system", "user", "assistant"]
    assert (tmp_path / "mine.txt").read_text() == "precious"
    assert printed[1] == f"(saved 1 messages to {tmp_path / 'chat.json'})"
    assert printed[-2].endswith("mine.txt exists; choose another name)")
    assert printed[-1].endswith("chat.json can't be written: No such file or directory)")


def test_commands_change_the_dialogue_and_its_settings(
    enter: Type, conversation: Conversation
) -> None:
    printed = enter(
        *("/system Be kind.", "Hi", "/reset", "/temperature 0.5", "/temperature x"),
        *("/temperature -1", "/length 2", "/length 2.5", "/length 0", "/save", "/none", ""),
    )

    assert [message.content for message in conversation.messages] == ["Be kind."]
    assert (conversation.sampling.temperature, conversation.sampling.max_new_tokens) == (0.5, 2)
    assert [*printed[:1], *printed[-9:]] == [
        "(new dialogue with this system message)",
        "(new dialogue)",
        "(temperature 0.5)",
        "(temperature takes a number, not 'x')",
        "(temperature must not be below 0, got -1.0)",
        "(max_new_tokens 2)",
        "(max_new_tokens takes an integer, not '2.5')",
        "(max_new_tokens must be above 0, got 0)",
        "(/save needs a file name)",
        "Unknown command /none; see /help.",
    ]
    told = "\n".join(enter("/system", "Hi", "tell me " * 999, "/help", "/quit", "/length 9"))
    assert told.startswith("(no system message)\n")
    assert re.search(rf"\n\(the message has \d+ tokens, .*\)\n{re.escape(HELP)}$", told)
    assert [message.role for message in conversation.messages] == ["user", "assistant"]
    assert conversation.sampling.max_new_tokens == 2


class Interrupted(io.StringIO):
    """Standard output at whose first line Ctrl-C comes."""

    def write(self, _: str) -> int:
        raise KeyboardInterrupt


def test_ctrl_c_ends_a_chat_whose_lines_come_from_a_pipe(
    enter: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Interrupted())

    with pytest.raises(KeyboardInterrupt):
        enter("/length 2")


@pytest.mark.jobs
def test_piped_lines_are_answered_and_the_command_succeeds() -> None:
    words = ("--path", "embedded", "--max-new-tokens", "3", "--seed", "1")
    done = run_command("chat.py", *words, stdin="hi\nquit\n")

    assert done.returncode == 0
    assert done.stdout.strip()
    assert "You:" not in done.stdout
