"""Ratings that people gave in the server's page, as examples: docs/rating.md has the format.

A line is never changed: one that names another in `supersedes` takes its place.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.data.examples import Example, Message
from pipeline.data.sources import Row
from pipeline.data.turns import (
    EMPTY_RESPONSE,
    NO_ANSWER,
    LeftOut,
    text,
    turns,
)
from pipeline.errors import DataError

NEEDS = ("schema", "kind", "messages", "answers")
MAY_HAVE = ("choice", "tie", "strength", "edit")
SCHEMA = 1
UNDO = "undo"

NO_PREFERENCE = "that prefer neither response"


def standing(rows: Sequence[Row]) -> list[Row]:
    """The rows without ratings that later ones took back or replaced; others as they are."""
    ratings = [row.columns for row in rows if _is_rating(row.columns)]
    gone = {each["supersedes"] for each in ratings if each["supersedes"] is not None}
    return [
        row
        for row in rows
        if not _is_rating(row.columns)
        or (row.columns["kind"] != UNDO and row.columns.get("id") not in gone)
    ]


def _is_rating(columns: Mapping[str, Any]) -> bool:
    return "schema" in columns and "kind" in columns and "supersedes" in columns


def rating_example(row: Row) -> Example:
    """The example in a rating: a preference, or a response that is good or bad by itself.

    Raises:
        LeftOut: it prefers neither response.
        DataError: it is of another version, or its fields contradict each other.
    """
    if row.columns["schema"] != SCHEMA:
        raise DataError(
            f"{row.origin}: a rating of schema {row.columns['schema']!r}, and {SCHEMA} is read;"
            " update the package"
        )
    prompt = turns(row, "messages")
    if not prompt or prompt[-1].role != "user":
        raise LeftOut(NO_ANSWER)
    answers = [_response(row, answer) for answer in _answers(row)]
    match row.columns["kind"]:
        case "pair":
            return _pair(row, prompt, answers)
        case "edit":
            return Example(prompt, (Message("assistant", text(row, "edit").strip()),))
        case "thumb":
            return _thumb(row, prompt, answers)
        case kind:
            raise DataError(f"{row.origin}: there is no kind of rating {kind!r}")


def _pair(row: Row, prompt: tuple[Message, ...], answers: Sequence[Message]) -> Example:
    choice = row.columns.get("choice")
    if choice is None or row.columns.get("tie"):
        raise LeftOut(NO_PREFERENCE)
    if len(answers) != 2 or choice not in (0, 1):
        raise DataError(f"{row.origin}: a pair has two answers, and choice is 0 or 1: {choice!r}")
    strength = row.columns.get("strength")
    margin = float(strength) if isinstance(strength, int) else None
    return Example(prompt, (answers[choice],), (answers[1 - choice],), margin=margin)


def _thumb(row: Row, prompt: tuple[Message, ...], answers: Sequence[Message]) -> Example:
    choice = row.columns.get("choice")
    if choice not in (0, 1) or len(answers) != 1:
        raise DataError(f"{row.origin}: a thumb has one answer, and choice is 0 or 1: {choice!r}")
    return Example(prompt, (answers[0],)) if choice == 1 else Example(prompt, (), (answers[0],))


def _answers(row: Row) -> list[Mapping[str, Any]]:
    answers = row.columns["answers"]
    if isinstance(answers, list) and all(isinstance(each, dict) for each in answers):
        return answers
    raise DataError(f"{row.origin}: answers must be a list of objects with a text each")


def _response(row: Row, answer: Mapping[str, Any]) -> Message:
    written = answer.get("text")
    if not isinstance(written, str):
        raise DataError(f"{row.origin}: an answer has no text")
    if not written.strip():
        raise LeftOut(EMPTY_RESPONSE)
    return Message("assistant", written.strip())
