"""Files of prompts: one JSON object a line, `prompt` or `messages`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from pipeline.data.examples import Message, Role
from pipeline.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """One line of a file of prompts."""

    given: object
    """As it stood in the file, under `prompt` or `messages`."""

    messages: tuple[Message, ...]
    """A text alone is one user message."""

    text: str | None
    """The text alone; None where the line has messages."""

    origin: str
    """File and line, for error messages."""


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts in a .jsonl file; blank lines are passed over.

    Raises:
        DataError: there is no such file, it has no prompt, or a line is not one; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DataError(f"--prompts {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read as text: {error}") from None
    prompts = [
        parse_prompt(line, origin=f"{path} line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise DataError(f"{path} has no prompts")
    return prompts


def parse_prompt(line: str, *, origin: str) -> Prompt:
    """The prompt in one line.

    Raises:
        DataError: the line is not a prompt; begins with `origin`.
    """
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{origin} is not valid JSON: {error.msg}") from None
    if not isinstance(row, Mapping) or ("prompt" in row) == ("messages" in row):
        raise DataError(f'{origin} must be an object with either "prompt" or "messages"')
    if "messages" in row:
        return Prompt(row["messages"], parse_messages(row["messages"], origin=origin), None, origin)
    if not isinstance(row["prompt"], str):
        raise DataError(f'{origin}: "prompt" must be text')
    return Prompt(row["prompt"], (Message("user", row["prompt"]),), row["prompt"], origin)


def parse_messages(value: object, *, origin: str) -> tuple[Message, ...]:
    """Messages from JSON: objects with `role` and `content`, the last one the user's."""
    roles = get_args(Role)
    turns = value if isinstance(value, list) else []
    messages = tuple(
        Message(turn["role"], turn["content"])
        for turn in turns
        if isinstance(turn, Mapping)
        and turn.get("role") in roles
        and isinstance(turn.get("content"), str)
    )
    if not messages or len(messages) < len(turns):
        raise DataError(
            f'{origin}: "messages" must be a list of objects with a "role" ({", ".join(roles)})'
            ' and a text "content"'
        )
    if messages[-1].role != "user":
        raise DataError(f"{origin}: the last message must be the user's")
    return messages
