"""Tasks: questions, the rows that they are read from, and programs that grade the responses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.data.examples import Message
from pipeline.data.rows.sources import Row, read_source
from pipeline.system.errors import DataError, counted

Grades = Mapping[str, Sequence[bool]]
"""Correctness of a response by metric: one value, or for IFEval one per instruction."""


@dataclass(frozen=True)
class Question:
    """A prompt of a task, and the data to grade its responses."""

    messages: tuple[Message, ...]
    """The dialogue, which ends in a user turn."""

    extra: Mapping[str, Any] = field(default_factory=dict)
    """Columns of the question's row that the task reads, such as the correct answer."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options for reading a task's rows and turning them into questions."""

    path: str | None = None
    """A data path; None uses the task's built-in rows, if it has any."""

    limit: int | None = None
    """Maximum number of questions; None uses all."""

    shots: int = 0
    """Number of demonstrations before each question, as earlier turns of the dialogue."""

    instruction: str = ""
    """Text appended to each question."""


@dataclass(frozen=True)
class Task:
    """A set of questions whose responses a program grades."""

    name: str

    read: Callable[[ReadOptions], list[Question]]
    """Reads the questions; raises DataError if a row lacks a required column."""

    grade: Callable[[Question, str], Grades]
    """Grades one response. The metrics are the same for all questions."""

    max_new_tokens: int
    """Default maximum number of tokens per response."""

    needs_path: bool = False
    """Whether the task needs a path to its rows."""

    takes_shots: bool = False
    """Whether the task's rows have solutions that can be shown as demonstrations."""


def read_task_rows(path: str, limit: int | None, *, shots: int = 0) -> tuple[list[Row], list[Row]]:
    """Read the rows of questions, and the rows to show as demonstrations.

    If the data path has a test split, its rows are the questions and the first training rows are
    the demonstrations. Otherwise the first `shots` rows are demonstrations, the others questions.

    Raises:
        DataError: there are too few rows for the demonstrations and a question.
    """
    source = read_source(path)
    if source.eval:
        demonstrations, questions = source.train[:shots], source.eval
    else:
        demonstrations, questions = source.train[:shots], source.train[shots:]
    if not questions or len(demonstrations) < shots:
        raise DataError(
            f"data path {path} has only {counted(len(source.train), 'row')}, too few for"
            f" {counted(shots, 'demonstration')} and a question; lower --shots"
        )
    return questions[:limit], demonstrations


def get_column(row: Row, name: str, kind: type | tuple[type, ...] = str) -> object:
    """Return the value of a row in column `name`.

    Raises:
        DataError: the column is missing or empty, or the value has a different type.
    """
    value = row.columns.get(name)
    if value is None:
        raise DataError(
            f"{row.origin} lacks the column {name}; it has {', '.join(sorted(row.columns))}"
        )
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join(allowed.__name__ for allowed in kinds)
        raise DataError(f"{row.origin}: {name} must be {expected}, got {type(value).__name__}")
    return value
