"""Convert rows of preference, chat and instruction data to examples, by the rows' shape.

A row is read by the first shape in `SHAPES` whose required columns it has.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from pipeline.config import RowColumns, find_column, parse_literal
from pipeline.data.examples import Example, Message
from pipeline.data.rows.columns import (
    EMPTY_RESPONSE,
    NO_ANSWER,
    SkipRow,
    Turns,
    add_system,
    add_tools,
    drop_leading_assistant,
    is_empty,
    join_names,
    label_column,
    read_dialogue,
    read_label,
    read_number,
    read_prompt,
    read_response,
    read_text,
    read_tie,
    read_turns,
    split_common_prompt,
    split_last_response,
)
from pipeline.data.rows.sources import Row
from pipeline.system.errors import DataError, counted


@dataclass
class ReadStats:
    """Counts of rows by use, and the columns of the rows."""

    skipped: Counter[str] = field(default_factory=Counter)
    """Skipped rows by reason."""

    prompt_only: Counter[str] = field(default_factory=Counter)
    """Rows that are used for their prompt only, by reason."""

    remarks: dict[str, list[str]] = field(default_factory=dict)
    """Origins of modified rows, by modification."""

    columns: set[str] = field(default_factory=set)
    """All columns of the rows, and unused keys in them."""

    used: set[str] = field(default_factory=set)
    """Columns that are read."""


def _make_example(prompt: Turns, chosen: Turns, rejected: Turns = ()) -> Example:
    """Build an example after checking the roles of the turns in its prompt and responses."""
    responses = [turns for turns in (chosen, rejected) if turns]
    if all(turn.role != "user" for turn in prompt):
        raise SkipRow(NO_ANSWER)
    if prompt[-1].role == "system":
        raise SkipRow("with a system turn right before the response")
    if any({turns[0].role, turns[-1].role} != {"assistant"} for turns in responses):
        raise SkipRow("whose response does not begin and end with an assistant turn")
    return Example(prompt, chosen, rejected)


def _read_preference(row: Row) -> Example:
    chosen, rejected = read_dialogue(row, "chosen"), read_dialogue(row, "rejected")
    if chosen is not None and rejected is not None:
        prompt, chosen, rejected = split_common_prompt(chosen, rejected)
        return Example(add_system(row, prompt), chosen, rejected, tie=read_tie(row))
    prompt = _read_separate_prompt(row)
    responses = (read_response(row, name, prompt) for name in ("chosen", "rejected"))
    return replace(_make_example(prompt, *responses), tie=read_tie(row))


def _read_separate_prompt(row: Row) -> Turns:
    """Return the prompt of two responses, from a column or from a dialogue as in LLaMA-Factory."""
    if "prompt" in row.columns:
        return read_prompt(row)
    for name in ("conversations", "messages"):
        if name in row.columns:
            turns = add_system(row, read_turns(row, name))
            return split_last_response(drop_leading_assistant(row, turns))[0]
    if "instruction" in row.columns:
        return _read_instruction(row)
    raise DataError(
        f"{row.origin}: without a prompt, chosen and rejected must be full dialogues, either as"
        ' turns or as "\\n\\nHuman: ...\\n\\nAssistant: ..." text; the columns are'
        f" {join_names(row.columns)}: select the prompt with --fields"
    )


def _read_stepwise(row: Row, name: str) -> Example:
    """Read a row in TRL's stepwise format, with its steps in the column `name`.

    Pipeline steps that do not use step labels get only the prompt: a response with wrong steps is
    not a demonstration.
    """
    prompt = _make_example(read_prompt(row), ()).prompt
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
        (step, _parse_step_label(row, label))
        for step, label in zip(steps, labels, strict=True)
        if step.strip()
    ]
    if not kept:
        raise SkipRow(EMPTY_RESPONSE)
    return Example(
        prompt, steps=tuple(step for step, _ in kept), step_labels=tuple(label for _, label in kept)
    )


def _parse_step_label(row: Row, value: Any) -> float | None:  # noqa: ANN401
    """Return the correctness of a step, from 0 to 1, or None if unknown."""
    if value is None:
        return None
    if not (isinstance(value, int | float) and math.isfinite(value) and 0 <= value <= 1):
        raise DataError(
            f"{row.origin}: the label of a step must be true, false, a number from 0 to 1, or null"
            f" if unknown, got {value!r}"
        )
    return float(value)


def _read_messages(row: Row, name: str) -> Example:
    full = add_system(row, read_turns(row, name))
    return _make_example(*split_last_response(drop_leading_assistant(row, full)))


def _read_instruction(row: Row) -> Turns:
    """Read the prompt in Alpaca's columns: earlier turns, then the instruction and its input."""
    history = parse_literal(row.columns.get("history") or [])
    if not isinstance(history, list) or any(
        not isinstance(pair, list | tuple) or list(map(type, pair)) != [str, str]
        for pair in history
    ):
        raise DataError(
            f"{row.origin}: history must be a list of pairs, [instruction, response], got"
            f" {str(history)[:80]}; rename the column if it has another meaning"
        )
    earlier = [(Message("user", ask), Message("assistant", reply)) for ask, reply in history]
    inputs = [read_text(row, name) for name in ("input", "context") if row.columns.get(name)]
    question = "\n\n".join([read_text(row, "instruction"), *inputs])
    return add_system(row, (*chain.from_iterable(earlier), Message("user", question)))


def _read_alpaca(row: Row) -> Example:
    output = "output" if "output" in row.columns else "response"
    prompt = _read_instruction(row)
    return _make_example(prompt, read_response(row, output, prompt))


def _read_pair(row: Row, answer: str, question: str = "prompt") -> Example:
    prompt, teacher = read_prompt(row, question), row.columns.get("top_logprobs")
    example = _make_example(prompt, read_response(row, answer, prompt))
    is_parsed = hasattr(teacher, "top_ids")  # otherwise, the column has another meaning
    return replace(example, teacher=teacher) if is_parsed else example


def _read_question(row: Row) -> Example:
    """Read a question and its answer, which may be a number, as in files of math problems."""
    if type(answer := row.columns["answer"]) in (int, float):
        row = replace(row, columns={**row.columns, "answer": str(answer)})
    return _read_pair(row, answer="answer", question="question")


SCHEMA = 1
UNDO = "undo"


def drop_revoked(rows: Sequence[Row]) -> list[Row]:
    """Drop ratings that later rows revoke or replace, and the rows that revoke them."""
    ratings = [
        row.columns for row in rows if {"schema", "kind", "supersedes"} <= row.columns.keys()
    ]
    ids = (rating["supersedes"] for rating in ratings)
    superseded = {str(revoked) for revoked in ids if revoked is not None}
    if not ratings:
        return list(rows)
    return [
        row
        for row in rows
        if row.columns.get("kind") != UNDO and str(row.columns.get("id")) not in superseded
    ]


def _read_rating(row: Row) -> Example:
    """Read a rating from the server's page: a preference, an edit, or one good or bad response."""
    if row.columns["schema"] != SCHEMA:
        raise DataError(
            f"{row.origin}: the rating has schema {row.columns['schema']!r}, but only {SCHEMA} is"
            " supported; update the package"
        )
    prompt = _make_example(read_turns(row, "messages"), ()).prompt
    answers, choice = row.columns["answers"], row.columns.get("choice")
    try:
        texts = [answer["text"].strip() for answer in answers]
    except (TypeError, KeyError, AttributeError):
        raise DataError(
            f'{row.origin}: answers must be a list of objects, each with a "text" field'
        ) from None
    if not all(texts):
        raise SkipRow(EMPTY_RESPONSE)
    responses = [(Message("assistant", answer),) for answer in texts]
    match row.columns["kind"], len(responses), choice:
        case "edit", _, _:
            return Example(prompt, (Message("assistant", read_text(row, "edit").strip()),))
        case "thumb", 1, 0 | 1:
            if choice:
                return Example(prompt, responses[0])
            return Example(prompt, rejected=responses[0])
        case "pair", _, _ if choice is None or row.columns.get("tie"):
            raise SkipRow("that prefer neither response")
        case "pair", 2, 0 | 1:
            strength = row.columns.get("strength")
            margin = float(strength) if isinstance(strength, int) else None
            return Example(prompt, responses[choice], responses[1 - choice], margin=margin)
        case kind, count, _:
            raise DataError(
                f"{row.origin}: a rating of kind {kind!r} can't have choice {choice!r} and"
                f" {counted(count, 'answer')}"
            )


@dataclass(frozen=True)
class RowShape:
    """A format of rows, recognized by their columns."""

    required: tuple[str, ...]
    """Columns that a row of this shape must have."""

    read: Callable[[Row], Example]
    """Function that reads a row; raises SkipRow if the row has nothing to train on."""

    optional: tuple[str, ...] = ("system",)
    """Further columns that `read` uses."""

    @property
    def columns(self) -> set[str]:
        """All columns that a row of this shape may have."""
        return {*self.required, *self.optional, *_COMMON_COLUMNS}


_MARGIN_COLUMNS = ("margin", "score_chosen", "score_rejected")
_COMMON_COLUMNS = {*_MARGIN_COLUMNS, "label", "kto_tag", "tools"}
"""Columns that a row of any shape may have."""

_ALPACA_COLUMNS = ("input", "context", "system", "history")

SHAPES = (
    RowShape(("prompt", "response", "top_logprobs"), partial(_read_pair, answer="response")),
    RowShape(
        ("schema", "kind", "messages", "answers"),
        _read_rating,
        ("choice", "tie", "strength", "edit"),
    ),
    RowShape(
        ("chosen", "rejected"),
        _read_preference,
        ("prompt", "conversations", "messages", "instruction", *_ALPACA_COLUMNS, "tie"),
    ),
    RowShape(("prompt", "completions", "labels"), partial(_read_stepwise, name="completions")),
    RowShape(("prompt", "steps", "labels"), partial(_read_stepwise, name="steps")),
    RowShape(("messages",), partial(_read_messages, name="messages")),
    RowShape(("conversations",), partial(_read_messages, name="conversations")),
    RowShape(("instruction", "output"), _read_alpaca, _ALPACA_COLUMNS),
    RowShape(("instruction", "response"), _read_alpaca, _ALPACA_COLUMNS),
    RowShape(("prompt", "chosen"), partial(_read_pair, answer="chosen")),
    RowShape(("prompt", "response"), partial(_read_pair, answer="response")),
    RowShape(("prompt", "completion"), partial(_read_pair, answer="completion")),
    RowShape(("question", "answer"), _read_question),
    RowShape(("prompt",), lambda row: _make_example(read_prompt(row), ())),
    RowShape(
        ("text",), lambda row: Example((), (Message("assistant", read_text(row, "text")),)), ()
    ),
)


def read_row(
    row: Row,
    fields: Mapping[str, str],
    stats: ReadStats | None = None,
    *,
    kept: RowColumns | None = None,
) -> Example | None:
    """Return the example in `row`, or None if the row is skipped (for lack of an answer, say).

    `fields` maps our column names to the row's, as in `{"prompt": "question"}`. `stats` records the
    columns that are read, or why the row is skipped; `kept` selects the columns in `extra`.

    Raises:
        DataError: no shape fits the row's columns, or a column has the wrong type.
    """
    stats = stats or ReadStats()
    kept = kept or RowColumns()
    mapped = {name: row.columns[column] for name, column in fields.items() if column in row.columns}
    merged = {**row.columns, **mapped}
    columns = {name: value for name, value in merged.items() if value is not None}
    shape = next(
        (s for s in SHAPES if columns.keys() >= {*s.required} and s.columns >= mapped.keys()), None
    )
    if shape is None:
        raise DataError(_describe_unknown_shape(row, columns))
    stats.columns.update(row.columns)
    used = {fields[name] if name in mapped else name for name in shape.columns & columns.keys()}
    stats.used.update(used, kept.needed & row.columns.keys())
    renamed = Row(columns, row.origin)
    try:
        example = replace(_read_shape(shape, renamed, stats, kept), extra=kept.select(row.columns))
    except SkipRow as reason:
        stats.skipped[str(reason)] += 1
        return None
    stats.columns |= renamed.unused
    for remark in renamed.remarks:
        stats.remarks.setdefault(remark, []).append(row.origin)
    return example


def _read_shape(shape: RowShape, row: Row, stats: ReadStats, kept: RowColumns) -> Example:
    """Read a row, and the columns that rows of any shape may contain: tools, margin and label."""
    example = replace(shape.read(row), origin=row.origin)
    example = replace(example, prompt=add_tools(row, example.prompt))
    if example.rejected and example.margin is None:
        example = replace(example, margin=_read_margin(row))
    for messages in (example.chosen, example.rejected):
        if any(map(is_empty, messages)):
            raise SkipRow(EMPTY_RESPONSE)
    # Empty assistant turns in the prompt are context, not training targets.
    turns = [replace(turn, trained=False) if is_empty(turn) else turn for turn in example.prompt]
    example = replace(example, prompt=tuple(turns))
    if (kept.labels or kept.known_labels) and not example.rejected:
        example = replace(example, label=read_label(row))
    if kept.labels or not example.prompt or not example.chosen or example.rejected:
        return example
    is_good = example.label if kept.known_labels else _read_quality(row)
    if is_good is False:
        stats.prompt_only["whose label marks the response as bad"] += 1
        return replace(example, chosen=(), rejected=example.chosen)
    if example.num_targets == 0:
        stats.prompt_only["without an assistant turn to train on"] += 1
        return replace(example, chosen=())
    return example


def _read_margin(row: Row) -> float | None:
    """Return `margin`, or else score_chosen - score_rejected, or None if the row has neither."""
    margin, chosen, rejected = (
        read_number(row, name) if name in row.columns else None for name in _MARGIN_COLUMNS
    )
    if margin is None and chosen is not None and rejected is not None:
        return chosen - rejected
    return margin


_UNCLEAR_LABELS = "0", "1", "-1", "good", "bad", "desirable", "undesirable", "chosen", "rejected"
"""Labels that could denote either the quality of a response or a class."""


def _read_quality(row: Row) -> bool | None:
    """Return the label of a KTO row: True for good, False for bad, None if there is none."""
    name = label_column(row.columns)
    word = str(row.columns.get(name)).strip().lower()
    is_known = word in ("true", "false")
    if word.removesuffix(".0") in _UNCLEAR_LABELS or (name == "kto_tag" and not is_known):
        raise DataError(
            f"{row.origin}: {name} is {word}; in a row with a response, it must be true (good) or"
            " false (bad); rename the column if it has another meaning"
        )
    return {"true": True, "false": False}.get(word)


def _describe_unknown_shape(row: Row, columns: Mapping[str, Any]) -> str:
    if not columns:
        return f"{row.origin}: the row is empty; remove it"
    for name, value in columns.items():
        item = value[0] if isinstance(value, list) and value else None
        if isinstance(item, dict) and any(item.keys() >= {*shape.required} for shape in SHAPES):
            return f"{row.origin} is not a row, but its {name} is a list of rows; save that list"
    known = ", ".join(" + ".join(shape.required) for shape in SHAPES)
    return (
        f"{row.origin}: no known row format has the columns {join_names(columns)}; the known"
        f" formats are {known};"
        ' map each column of one of them with --fields, such as \'{"prompt": "question"}\''
    )


def check_columns(
    rows: Sequence[Mapping[str, Any]], fields: Mapping[str, str], kept: RowColumns | None = None
) -> list[str]:
    """Check that each required column is in some row; return notes on those that some rows lack.

    Raises:
        DataError: no shape reads a name in `fields`, or no row has a required column.
    """
    known = {name for shape in SHAPES for name in shape.columns}
    columns = {name for row in rows for name in row}
    for name, column in fields.items():
        if name not in known:
            raise DataError(f"fields: {name} is unknown; use one of {join_names(known)}")
        if column not in columns:
            raise DataError(
                f"fields: no row has the column {column} (for {name}); the columns are"
                f" {join_names(columns)}"
            )
    notes: list[str] = []
    for name in sorted(kept.needed if kept else ()):
        num_missing = sum(find_column(row, name) is None for row in rows)
        if num_missing == len(rows):
            raise DataError(
                f"no row has the column {name}, which a reward or environment reads; the"
                f" columns are {join_names(columns)}: rename one, or select another for the reward"
            )
        if num_missing:
            notes.append(
                f"the column {name}, which a reward or environment reads, is missing in"
                f" {num_missing} of {len(rows)} rows"
            )
    return notes
