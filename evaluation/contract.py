"""What a task is: questions, and a program that grades responses to them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.data.examples import Message

Grades = Mapping[str, Sequence[bool]]
"""By metric, what a response got right: one thing for most, of IFEval one for each instruction."""


@dataclass(frozen=True)
class Question:
    """A prompt of a task, and what its responses are compared with."""

    messages: tuple[Message, ...]
    """Ends in a user turn."""

    extra: Mapping[str, Any] = field(default_factory=dict)
    """Columns of its row that the task reads: the right answer, say."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Which rows of a task are read."""

    path: str | None = None
    """A data path; None takes the task's own rows, where it has some."""

    limit: int | None = None
    """Questions, from the first; None is all."""

    shots: int = 0
    """Demonstrations in front of each question, as earlier turns of the dialogue."""

    instruction: str = ""
    """Put below each question."""


@dataclass(frozen=True)
class Task:
    """A set of questions that a program checks the responses to."""

    name: str

    read: Callable[[Reading], list[Question]]
    """Raises DataError where a row lacks what it needs."""

    grade: Callable[[Question, str], Grades]
    """Grades one response. The metrics are the same for all questions."""

    max_new_tokens: int
    """Tokens of the longest response, where the settings name no other number."""

    needs_path: bool = False
    """Whether it has no rows of its own."""

    takes_shots: bool = False
    """Whether its rows have solutions that can be shown as demonstrations."""
