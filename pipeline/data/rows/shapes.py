"""From rows to examples: the shapes of preference, chat and instruction data.

A shape is recognized by its required columns. A row is read by the first shape in `SHAPES` whose
columns it has.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pipeline.config import RowColumns, find_column
from pipeline.data.examples import Example, Message
from pipeline.data.rows.columns import (
    EMPTY_RESPONSE,
    NO_ANSWER,
    LeftOut,
    Turns,
    common_prompt,
    dialogue,
    from_first_user,
    is_empty,
    label_column,
    last_response,
    names,
    number,
    prompt,
    read_label,
    read_tie,
    response,
    text,
    turns,
    with_system,
    with_tools,
)
from pipeline.data.rows.sources import Row
from pipeline.system.errors import DataError


@dataclass
class Reading:
    """Counts of rows read, by their use."""

    left_out: Counter[str] = field(default_factory=Counter)
    """Unused rows by reason."""

    no_demonstrations: Counter[str] = field(default_factory=Counter)
    """Rows of which only the prompt is used, by reason."""

    remarks: dict[str, list[str]] = field(default_factory=dict)
    """Origins of modified rows, by the modification."""

    columns: set[str] = field(default_factory=set)
    """All columns that rows have, and keys in them that nothing reads."""

    used: set[str] = field(default_factory=set)
    """Columns that are read from the rows."""


def _answered(question: Turns, chosen: Turns, rejected: Turns = ()) -> Example:
    """Return the example if its prompt has a question and the assistant's turn is next."""
    responses = [turns for turns in (chosen, rejected) if turns]
    if all(turn.role != "user" for turn in question):
        raise LeftOut(NO_ANSWER)
    if question[-1].role == "system":
        raise LeftOut("with a system turn right before the response")
    if any({turns[0].role, turns[-1].role} != {"assistant"} for turns in responses):
        raise LeftOut("whose response does not begin and end with an assistant turn")
    return Example(question, chosen, rejected)


def _preference(row: Row) -> Example:
    chosen, rejected = dialogue(row, "chosen"), dialogue(row, "rejected")
    if chosen is not None and rejected is not None:
        question, chosen, rejected = common_prompt(chosen, rejected)
        return Example(with_system(row, question), chosen, rejected, tie=read_tie(row))
    question = _separate_prompt(row)
    responses = (response(row, name, question) for name in ("chosen", "rejected"))
    return replace(_answered(question, *responses), tie=read_tie(row))


def _separate_prompt(row: Row) -> Turns:
    """Return the prompt of two responses: a column, or a dialogue in LLaMA-Factory's forms."""
    if "prompt" in row.columns:
        return prompt(row)
    for name in ("conversations", "messages"):
        if name in row.columns:
            return last_response(from_first_user(row, with_system(row, turns(row, name))))[0]
    if "instruction" in row.columns:
        return _instruction(row)
    raise DataError(
        f"{row.origin}: without a prompt, chosen and rejected must be full dialogues, turns or"
        ' "\\n\\nHuman: ...\\n\\nAssistant: ..." text; the columns are'
        f" {names(row.columns)}: select the prompt with --fields"
    )


def _stepwise(row: Row, name: str) -> Example:
    """Read a row in TRL's stepwise format, with its steps in the column `name`.

    Pipeline steps that do not use step labels get only the prompt: a response with wrong steps is
    not a demonstration.
    """
    question = _answered(prompt(row), ()).prompt
    steps, labels = row.columns[name], row.columns["labels"]
    are_lists = isinstance(steps, list) and isinstance(labels, list)
    if not are_lists or len(steps) != len(labels):
        raise DataError(
            f"{row.origin}: {name} and labels must be lists of the same length; provide one label"
            " per step, null if unknown"
        )
    if not all(isinstance(step, str) for step in steps):
        raise DataError(f"{row.origin}: the steps in {name} must be strings")
    kept = [
        (step, _step_label(row, label))
        for step, label in zip(steps, labels, strict=True)
        if step.strip()
    ]
    if not kept:
        raise LeftOut(EMPTY_RESPONSE)
    return Example(
        question,
        steps=tuple(step for step, _ in kept),
        step_labels=tuple(label for _, label in kept),
    )


def _step_label(row: Row, value: Any) -> float | None:  # noqa: ANN401
    """Return the correctness of a step, from 0 to 1; None if unknown."""
    if value is None:
        return None
    if not (isinstance(value, int | float) and math.isfinite(value) and 0 <= value <= 1):
        raise DataError(
            f"{row.origin}: the label of a step must be true, false, a number from 0 to 1, or null"
            f" if unknown, got {value!r}"
        )
    return float(value)


def _messages(row: Row, name: str) -> Example:
    full = with_system(row, turns(row, name))
    return _answered(*last_response(from_first_user(row, full)))


def _instruction(row: Row) -> Turns:
    """The prompt of Alpaca's columns: the instruction, then its input."""
    inputs = [text(row, name) for name in ("input", "context") if row.columns.get(name)]
    question = "\n\n".join([text(row, "instruction"), *inputs])
    return with_system(row, (Message("user", question),))


def _alpaca(row: Row) -> Example:
    output = "output" if "output" in row.columns else "response"
    question = _instruction(row)
    return _answered(question, response(row, output, question))


def _pair(row: Row, answer: str, question: str = "prompt") -> Example:
    before = prompt(row, question)
    return _answered(before, response(row, answer, before))


SCHEMA = 1
UNDO = "undo"


def standing(rows: Sequence[Row]) -> list[Row]:
    """Return the rows without ratings that later ones revoked or replaced."""
    ratings = [
        row.columns for row in rows if {"schema", "kind", "supersedes"} <= row.columns.keys()
    ]
    gone = {rating["supersedes"] for rating in ratings} - {None}
    if not ratings:
        return list(rows)
    return [
        row for row in rows if row.columns.get("kind") != UNDO and row.columns.get("id") not in gone
    ]


def _rating(row: Row) -> Example:
    """A rating from the server's page: a preference, or a single good or bad response."""
    if row.columns["schema"] != SCHEMA:
        raise DataError(
            f"{row.origin}: the rating has schema {row.columns['schema']!r}, but only {SCHEMA} is"
            " supported; update the package"
        )
    question = _answered(turns(row, "messages"), ()).prompt
    answers, choice = row.columns["answers"], row.columns.get("choice")
    try:
        texts = [answer["text"].strip() for answer in answers]
    except (TypeError, KeyError, AttributeError):
        raise DataError(
            f"{row.origin}: answers must be a list of objects, each with a text"
        ) from None
    if not all(texts):
        raise LeftOut(EMPTY_RESPONSE)
    responses = [(Message("assistant", answer),) for answer in texts]
    match row.columns["kind"], len(responses), choice:
        case "edit", _, _:
            return Example(question, (Message("assistant", text(row, "edit").strip()),))
        case "thumb", 1, 0 | 1:
            if choice:
                return Example(question, responses[0])
            return Example(question, rejected=responses[0])
        case "pair", _, _ if choice is None or row.columns.get("tie"):
            raise LeftOut("that prefer neither response")
        case "pair", 2, 0 | 1:
            strength = row.columns.get("strength")
            margin = float(strength) if isinstance(strength, int) else None
            return Example(question, responses[choice], responses[1 - choice], margin=margin)
        case kind, count, _:
            raise DataError(
                f"{row.origin}: a rating of kind {kind!r} can't have {count} answers and choice"
                f" {choice!r}"
            )


@dataclass(frozen=True)
class Shape:
    """One form of rows."""

    needs: tuple[str, ...]
    """Columns a row must have to be of this shape."""

    read: Callable[[Row], Example]
    """Function that reads a row; raises LeftOut if the row has nothing to train on."""

    may_have: tuple[str, ...] = ("system",)
    """Further columns it reads."""

    @property
    def reads(self) -> set[str]:
        """All columns that it reads."""
        return {*self.needs, *self.may_have, *_EVERYWHERE}


_MARGINS = ("margin", "score_chosen", "score_rejected")
_EVERYWHERE = {*_MARGINS, "label", "kto_tag", "tools"}
"""Columns that a row of any shape may have."""

_ALPACA = ("input", "context", "system")

SHAPES = (
    Shape(
        ("schema", "kind", "messages", "answers"), _rating, ("choice", "tie", "strength", "edit")
    ),
    Shape(
        ("chosen", "rejected"),
        _preference,
        ("prompt", "conversations", "messages", "instruction", *_ALPACA, "tie"),
    ),
    Shape(("prompt", "completions", "labels"), partial(_stepwise, name="completions")),
    Shape(("prompt", "steps", "labels"), partial(_stepwise, name="steps")),
    Shape(("messages",), partial(_messages, name="messages")),
    Shape(("conversations",), partial(_messages, name="conversations")),
    Shape(("instruction", "output"), _alpaca, _ALPACA),
    Shape(("instruction", "response"), _alpaca, _ALPACA),
    Shape(("prompt", "chosen"), partial(_pair, answer="chosen")),
    Shape(("prompt", "response"), partial(_pair, answer="response")),
    Shape(("prompt", "completion"), partial(_pair, answer="completion")),
    Shape(("question", "answer"), partial(_pair, answer="answer", question="question")),
    Shape(("prompt",), lambda row: _answered(prompt(row), ())),
    Shape(("text",), lambda row: Example((), (Message("assistant", text(row, "text")),)), ()),
)


def read_row(
    row: Row,
    fields: Mapping[str, str],
    reading: Reading | None = None,
    *,
    kept: RowColumns | None = None,
) -> Example | None:
    """Return the example in `row`; None if it has nothing to train on, such as an empty dialogue.

    Args:
        row: the columns and their origin.
        fields: names of the row's columns, by our names for them, such as `{"prompt": "question"}`.
        reading: receives the columns read, and why a row is dropped.
        kept: columns to keep in `extra`.

    Raises:
        DataError: no shape fits the row's columns, or a column has the wrong type.
    """
    reading = reading or Reading()
    kept = kept or RowColumns()
    given = {ours: row.columns[theirs] for ours, theirs in fields.items() if theirs in row.columns}
    merged = {**row.columns, **given}
    columns = {name: value for name, value in merged.items() if value is not None}
    shape = next(
        (s for s in SHAPES if columns.keys() >= {*s.needs} and s.reads >= given.keys()), None
    )
    if shape is None:
        raise DataError(_unknown_shape(row, columns))
    reading.columns.update(row.columns)
    used = {fields[name] if name in given else name for name in shape.reads & columns.keys()}
    reading.used.update(used, kept.needed & row.columns.keys())
    renamed = Row(columns, row.origin)
    try:
        example = replace(_example(shape, renamed, reading, kept), extra=kept.select(row.columns))
    except LeftOut as reason:
        reading.left_out[str(reason)] += 1
        return None
    reading.columns |= renamed.unused
    for remark in renamed.remarks:
        reading.remarks.setdefault(remark, []).append(row.origin)
    return example


def _example(shape: Shape, row: Row, reading: Reading, kept: RowColumns) -> Example:
    """Read a row, with the columns that rows of any shape may have: tools, margin and label."""
    example = replace(shape.read(row), origin=row.origin)
    example = replace(example, prompt=with_tools(row, example.prompt))
    if example.rejected and example.margin is None:
        example = replace(example, margin=_margin(row))
    for messages in (example.chosen, example.rejected):
        if any(map(is_empty, messages)):
            raise LeftOut(EMPTY_RESPONSE)
    # Empty assistant turns in the prompt are context, not training targets.
    turns = [replace(turn, trained=False) if is_empty(turn) else turn for turn in example.prompt]
    example = replace(example, prompt=tuple(turns))
    if (kept.labels or kept.known_labels) and not example.rejected:
        example = replace(example, label=read_label(row))
    if kept.labels or not example.prompt or not example.chosen or example.rejected:
        return example
    is_bad = example.label if kept.known_labels else _quality(row)
    if is_bad is False:
        reading.no_demonstrations["whose label marks the response as bad"] += 1
        return replace(example, chosen=(), rejected=example.chosen)
    if example.num_targets == 0:
        reading.no_demonstrations["without an assistant turn to train on"] += 1
        return replace(example, chosen=())
    return example


def _margin(row: Row) -> float | None:
    """The column `margin`, else score_chosen - score_rejected, else None."""
    margin, chosen, rejected = (
        number(row, name) if name in row.columns else None for name in _MARGINS
    )
    if margin is None and chosen is not None and rejected is not None:
        return chosen - rejected
    return margin


def _quality(row: Row) -> bool | None:
    """Return the label of KTO's rows: True for good, False for bad, None if there is none."""
    name = label_column(row.columns)
    word = str(row.columns.get(name)).strip().lower()
    if word.removesuffix(".0") in ("0", "1"):
        raise DataError(
            f"{row.origin}: {name} is {word}; with a response it must be true (good) or false"
            " (bad); rename it if it has another meaning"
        )
    return {"true": True, "false": False}.get(word)


def _unknown_shape(row: Row, columns: Mapping[str, Any]) -> str:
    if not columns:
        return f"{row.origin}: the row is empty; remove it"
    for name, value in columns.items():
        item = value[0] if isinstance(value, list) and value else None
        if isinstance(item, dict) and any(item.keys() >= {*shape.needs} for shape in SHAPES):
            return f"{row.origin} is no row, but {name} is a list of rows; save only this list"
    known = ", ".join(" + ".join(shape.needs) for shape in SHAPES)
    return (
        f"{row.origin}: no known row format has the columns {names(columns)}; known are {known}:"
        ' map the columns with --fields, such as \'{"prompt": "question"}\''
    )


def check_columns(
    rows: Sequence[Mapping[str, Any]], fields: Mapping[str, str], kept: RowColumns | None = None
) -> list[str]:
    """Check that some row has each of the required columns; return notes on those that some lack.

    Raises:
        DataError: no shape reads a name in `fields`, or no row has a required column.
    """
    known = {name for shape in SHAPES for name in shape.reads}
    columns = {name for row in rows for name in row}
    for ours, theirs in fields.items():
        if ours not in known:
            raise DataError(f"fields: {ours} is unknown; use one of {names(known)}")
        if theirs not in columns:
            raise DataError(
                f"fields: no row has the column {theirs} (for {ours}); there are {names(columns)}"
            )
    notes: list[str] = []
    for name in sorted(kept.needed if kept else ()):
        lacking = sum(find_column(row, name) is None for row in rows)
        if lacking == len(rows):
            raise DataError(
                f"no row has the column {name}, which a reward or environment reads, but only"
                f" {names(columns)}: rename one, or select another column for the reward"
            )
        if lacking:
            notes.append(
                f"{lacking} of {len(rows)} rows have no {name}, which a reward or environment reads"
            )
    return notes
