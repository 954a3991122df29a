"""The terminal of the chat."""

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from inference.conversation import HELP, Conversation, Terminal
from tests.commands import run_command

EnterLines = Callable[..., list[str]]


@pytest.fixture
def conversation(make_conversation: Callable[..., Conversation]) -> Conversation:
    return make_conversation(temperature=0.0, max_new_tokens=3)


@pytest.fixture
def enter_lines(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> EnterLines:
    """A function that enters lines through a pipe and returns the printed lines."""

    def run(*lines: str) -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        Terminal(conversation).run()
        return capsys.readouterr().out.splitlines()

    return run


def test_save_overwrites_its_own_file_but_no_other(
    enter_lines: EnterLines, conversation: Conversation, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("precious")

    printed = enter_lines(
        "/system Be kind.",
        f"/save {tmp_path / 'chat.json'}",
        "Hi",
        f"/save {tmp_path / 'chat.json'}",
        f"/save {tmp_path / 'mine.txt'}",
        f"/save {tmp_path / 'none' / 'chat.json'}",
        "/save ~no-such-user/chat.json",
        f"/save {300 * 'x'}",
    )

    saved = json.loads((tmp_path / "chat.json").read_text())
    assert saved == [{"role": m.role, "content": m.content} for m in conversation.messages]
    assert [turn["role"] for turn in saved] == ["system", "user", "assistant"]
    assert (tmp_path / "mine.txt").read_text() == "precious"
    assert printed[1] == f"(saved 1 message to {tmp_path / 'chat.json'})"
    assert printed[-4].endswith("mine.txt exists; choose another name)")
    assert printed[-3].endswith("chat.json can't be written: No such file or directory)")
    assert "~no-such-user/chat.json can't be written" in printed[-2]
    assert printed[-1].endswith("can't be written: File name too long)")


def test_commands_change_the_dialogue_and_settings(
    enter_lines: EnterLines, conversation: Conversation
) -> None:
    printed = enter_lines(
        *("/system Be kind.", "Hi", "/reset", "/temperature 0.5", "/temperature x"),
        *("/temperature -1", "/length 2", "/length 2.5", "/length 0", "/save", "/none", ""),
    )

    assert [message.content for message in conversation.messages] == ["Be kind."]
    assert (conversation.sampling.temperature, conversation.sampling.max_new_tokens) == (0.5, 2)
    assert [*printed[:1], *printed[-9:]] == [
        "(new dialogue with this system message)",
        "(new dialogue)",
        "(temperature 0.5)",
        "(temperature must be a number, got 'x')",
        "(temperature must be at least 0, got -1.0)",
        "(max_new_tokens 2)",
        "(max_new_tokens must be an integer, got '2.5')",
        "(max_new_tokens must be positive, got 0)",
        "(/save needs a file name)",
        "Unknown command /none; see /help.",
    ]
    output = "\n".join(
        enter_lines("/system", "Hi", "tell me " * 999, "/help", "/quit", "/length 9")
    )
    assert output.startswith("(no system message)\n")
    assert re.search(rf"\n\(the message has \d+ tokens, .*\)\n{re.escape(HELP)}$", output)
    assert [message.role for message in conversation.messages] == ["user", "assistant"]
    assert conversation.sampling.max_new_tokens == 2


class InterruptedOutput(io.StringIO):
    """Standard output that is interrupted at its first line."""

    def write(self, text: str) -> int:
        if text:  # input() writes an empty prompt
            setattr(self, "write", super().write)  # noqa: B010
            raise KeyboardInterrupt
        return 0


@pytest.mark.parametrize("line", ["/length 2", "Hi"])
def test_ctrl_c_ends_a_chat_with_piped_input(
    line: str, enter_lines: EnterLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", InterruptedOutput())

    with pytest.raises(KeyboardInterrupt):
        enter_lines(line, "How are you?")


@pytest.mark.jobs
def test_command_answers_piped_lines() -> None:
    options = ("--path", "embedded", "--max-new-tokens", "3", "--seed", "1", "--system", "\udcff")
    result = run_command("chat.py", *options, stdin="hi\nquit\n")

    assert result.returncode == 0
    assert result.stdout.strip()
    assert "You:" not in result.stdout
