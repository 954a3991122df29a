"""IFEval: prompts whose instructions programs check (Zhou et al. 2023, arXiv:2311.07911).

Rows have the public schema: `key`, `prompt`, `instruction_id_list`, and `kwargs`, a mapping for
each instruction. The checks are our own readings of the instructions.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from evaluation.contract import Grades, Question, Reading, Task, column, rows_of
from evaluation.ifeval.instructions import FORMS, LANGUAGE, LENGTHS, WORDS, Arguments
from pipeline.data.examples import Message
from pipeline.data.rows.sources import Row
from pipeline.system.errors import DataError, suggestion

INSTRUCTIONS = {**WORDS, **LANGUAGE, **LENGTHS, **FORMS}
"""By their names in the public rows."""


def read(reading: Reading) -> list[Question]:
    """The prompts of a data path.

    Raises:
        DataError: a row lacks a column, or names an instruction or arguments that there aren't.
    """
    assert reading.path is not None
    rows, _ = rows_of(reading.path, reading.limit)
    return [
        Question(
            (Message("user", str(column(row, "prompt"))),), {"instructions": _instructions(row)}
        )
        for row in rows
    ]


def grade(question: Question, response: str) -> Grades:
    """Which instructions a response follows, and whether all; strict and loose.

    Loose takes an instruction as followed if it is by the response without its first or last line,
    or without asterisks: an opening, a closing sentence or bold letters spoil many a check.
    """
    instructions: list[tuple[str, Arguments]] = question.extra["instructions"]
    strict = [follows(response, name, arguments) for name, arguments in instructions]
    loose = [
        any(follows(text, name, arguments) for text in variants(response))
        for name, arguments in instructions
    ]
    return {
        "prompt_strict": (all(strict),),
        "instruction_strict": strict,
        "prompt_loose": (all(loose),),
        "instruction_loose": loose,
    }


def follows(response: str, name: str, arguments: Arguments) -> bool:
    """Whether a response follows an instruction; an empty one follows none."""
    return bool(response.strip()) and INSTRUCTIONS[name].follows(response, arguments)


def variants(response: str) -> Iterator[str]:
    """The response, and it without its first line, its last, both; each also without asterisks."""
    lines = response.split("\n")
    for kept in (lines, lines[1:], lines[:-1], lines[1:-1]):
        text = "\n".join(kept).strip()
        yield text
        yield text.replace("*", "")


def _instructions(row: Row) -> list[tuple[str, Arguments]]:
    names = column(row, "instruction_id_list", list)
    given = column(row, "kwargs", list)
    assert isinstance(names, list)
    assert isinstance(given, list)
    if not names or len(names) != len(given):
        raise DataError(
            f"{row.origin}: instruction_id_list has {len(names)} instructions and kwargs"
            f" {len(given)}; each instruction needs its own, empty if it takes none"
        )
    return [_instruction(row, *each) for each in zip(names, given, strict=True)]


def _instruction(row: Row, name: object, given: object) -> tuple[str, Arguments]:
    if not isinstance(name, str) or name not in INSTRUCTIONS:
        raise DataError(
            f"{row.origin}: there is no instruction {name}; {suggestion(str(name), INSTRUCTIONS)}"
        )
    if not isinstance(given, Mapping):
        raise DataError(f"{row.origin}: kwargs must hold a mapping for {name}, got {given!r}")
    arguments: dict[str, Any] = {key: each for key, each in given.items() if each is not None}
    INSTRUCTIONS[str(name)].check(arguments, f"{row.origin}: {name}")
    return str(name), arguments


IFEVAL = Task("ifeval", read, grade, max_new_tokens=1024, needs_path=True)
