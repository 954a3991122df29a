"""From rows to examples: the shapes that preference, chat and instruction data come in.

A shape is recognised by the columns it needs. The first one in `SHAPES` whose columns a row has
reads the row.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from pipeline.data.dialogues import (
    Turns,
    common_prompt,
    join_turns,
    last_response,
    parse_dialogue,
)
from pipeline.data.examples import Example, Message, Role
from pipeline.data.sources import Row
from pipeline.errors import DataError

_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}


@dataclass(frozen=True)
class Shape:
    """One form of rows."""

    needs: tuple[str, ...]
    """Columns a row must have to be of this shape."""

    read: Callable[[Row], Example | None]
    """The example in a row; None where the row holds nothing to train on."""

    may_have: tuple[str, ...] = ()
    """Further columns it reads."""


def read_row(row: Row, fields: Mapping[str, str]) -> Example | None:
    """The example in `row`; None where it holds nothing to train on, such as an empty dialogue.

    Args:
        row: the columns and their origin.
        fields: our names of columns to the row's, `{"prompt": "question"}`.

    Raises:
        DataError: no shape fits the row's columns, or a column holds something else than it should.
    """
    given = {ours: row.columns[theirs] for ours, theirs in fields.items() if theirs in row.columns}
    columns = {name: value for name, value in {**row.columns, **given}.items() if value is not None}
    named = Row(columns, row.origin)
    for shape in SHAPES:
        if _fits(shape, columns, given):
            example = shape.read(named)
            return example and replace(example, margin=_margin(named), origin=row.origin)
    raise DataError(
        f"{row.origin}: no known shape of row has the columns {_list(columns)};"
        " needed are prompt + chosen + rejected, chosen + rejected dialogues, messages,"
        " conversations, instruction + output, prompt + response, prompt, or text: say which column"
        """ is which with --fields, such as '{"prompt": "question", "response": "best"}'"""
    )


def check_fields(fields: Mapping[str, str], columns: Collection[str]) -> None:
    """Raise DataError for a name in `fields` that no shape reads, or a column that isn't there."""
    known = {name for shape in SHAPES for name in (*shape.needs, *shape.may_have)} | _MARGINS
    for ours, theirs in fields.items():
        if ours not in known:
            raise DataError(f"fields: {ours} is not a name we know; use one of {_list(known)}")
        if theirs not in columns:
            raise DataError(
                f"fields: no row has the column {theirs} (for {ours}); there are {_list(columns)}"
            )


def _fits(shape: Shape, columns: Collection[str], given: Collection[str]) -> bool:
    """Whether `columns` has what `shape` needs, and the shape reads all that `--fields` gave."""
    reads = {*shape.needs, *shape.may_have, *_MARGINS}
    return all(name in columns for name in shape.needs) and reads.issuperset(given)


def _list(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _text(row: Row, name: str) -> str:
    value = row.columns[name]
    if not isinstance(value, str):
        raise DataError(
            f"{row.origin}: {name} must be text, got {type(value).__name__};"
            " name another column with --fields or mend the row"
        )
    return value


def _turns(row: Row, name: str) -> Turns:
    """The turns in a column of {"role", "content"} or ShareGPT's {"from", "value"} objects."""
    value = row.columns[name]
    if not isinstance(value, list):
        raise DataError(
            f"{row.origin}: {name} must be a list of turns, got {type(value).__name__};"
            " name another column with --fields or mend the row"
        )
    return join_turns([_turn(row, name, turn) for turn in value])


def _turn(row: Row, name: str, turn: object) -> Message:
    if isinstance(turn, dict):
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if isinstance(content, list):  # parts, as multi-modal chats have them
            parts = [part.get("text") if isinstance(part, dict) else part for part in content]
            texts = [part for part in parts if isinstance(part, str)]
            content = "".join(texts) if len(texts) == len(parts) else None
        if role in _ROLES and isinstance(content, str):
            return Message(_ROLES[role], content)
        if isinstance(content, str):
            raise DataError(
                f"{row.origin}: {name} has a turn of role {role!r};"
                f" roles are {_list(_ROLES)}: leave such rows out"
            )
    raise DataError(
        f'{row.origin}: a turn in {name} must be {{"role": ..., "content": ...}} or'
        f' {{"from": ..., "value": ...}} with text, got {str(turn)[:80]}'
    )


def _prompt(row: Row, name: str = "prompt") -> Turns:
    """A prompt column: turns, a "Human: ... Assistant:" text, or the text of one user turn."""
    if isinstance(row.columns[name], list):
        return _with_system(row, _turns(row, name))
    text = _text(row, name)
    return _with_system(row, parse_dialogue(text) or (Message("user", text),))


def _with_system(row: Row, turns: Turns) -> Turns:
    if not row.columns.get("system"):
        return turns
    return (Message("system", _text(row, "system")), *turns)


def _response(row: Row, name: str) -> Turns:
    """A response column: turns, or the text of one assistant turn."""
    if isinstance(row.columns[name], list):
        return _turns(row, name)
    return (Message("assistant", _text(row, name).strip()),)


def _dialogue(row: Row, name: str) -> Turns | None:
    """The column as a whole dialogue, from its first user turn on; None if it is a response."""
    if isinstance(row.columns[name], list):
        turns = _turns(row, name)
        return turns if turns and turns[0].role != "assistant" else None
    return parse_dialogue(_text(row, name))


def _preference(row: Row) -> Example | None:
    chosen, rejected = _dialogue(row, "chosen"), _dialogue(row, "rejected")
    if chosen is not None and rejected is not None:
        parts = common_prompt(chosen, rejected)
        return parts and Example(_with_system(row, parts[0]), parts[1], parts[2])
    if "prompt" not in row.columns:
        raise DataError(
            f"{row.origin}: without a prompt, chosen and rejected must be whole dialogues, turns or"
            ' "\\n\\nHuman: ...\\n\\nAssistant: ..." text; it has the columns'
            f" {_list(row.columns)}: say which one is the prompt with --fields"
        )
    prompt = _prompt(row)
    return _answered(prompt, _response(row, "chosen"), _response(row, "rejected"))


def _answered(prompt: Turns, chosen: Turns, rejected: Turns = ()) -> Example | None:
    """The example, if its prompt ends in a user turn and the assistant takes the next."""
    responses = [response for response in (chosen, rejected) if response]
    if not prompt or prompt[-1].role != "user" or not responses:
        return None
    if any(response[0].role != "assistant" for response in responses):
        return None
    if any(response[-1].role != "assistant" for response in responses):
        return None
    return Example(prompt, chosen, rejected)


def _messages(row: Row) -> Example | None:
    return _chat(_with_system(row, _turns(row, "messages")))


def _conversations(row: Row) -> Example | None:
    turns = _with_system(row, _turns(row, "conversations"))
    system = turns[:1] if turns and turns[0].role == "system" else ()
    turns = turns[len(system) :]
    if turns and turns[0].role == "assistant":  # cut out of a longer chat: no user turn to answer
        turns = turns[1:]
    return _chat((*system, *turns))


def _chat(turns: Turns) -> Example | None:
    prompt, response = last_response(turns)
    if not response:
        return Example(prompt) if prompt and prompt[-1].role == "user" else None
    return _answered(prompt, response)


def _alpaca(row: Row) -> Example | None:
    output = "output" if "output" in row.columns else "response"
    instruction = _text(row, "instruction")
    inputs = [_text(row, name) for name in ("input", "context") if row.columns.get(name)]
    text = "\n\n".join([instruction, *inputs])
    return _answered(_with_system(row, (Message("user", text),)), _response(row, output))


def _pair(response: str, prompt: str = "prompt") -> Callable[[Row], Example | None]:
    def read(row: Row) -> Example | None:
        return _answered(_prompt(row, prompt), _response(row, response))

    return read


def _prompt_only(row: Row) -> Example | None:
    prompt = _prompt(row)
    return Example(prompt) if prompt and prompt[-1].role == "user" else None


def _plain_text(row: Row) -> Example | None:
    text = _text(row, "text")
    return Example((), (Message("assistant", text),)) if text.strip() else None


_MARGINS = {"margin", "score_chosen", "score_rejected"}


def _margin(row: Row) -> float | None:
    """The column `margin`, else score_chosen - score_rejected, else None."""
    for name in _MARGINS.intersection(row.columns):
        value = row.columns[name]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise DataError(f"{row.origin}: {name} must be a finite number, got {value!r}")
    if "margin" in row.columns:
        return float(row.columns["margin"])
    if "score_chosen" in row.columns and "score_rejected" in row.columns:
        return float(row.columns["score_chosen"] - row.columns["score_rejected"])
    return None


SHAPES = (
    Shape(("chosen", "rejected"), _preference, ("prompt", "system")),
    Shape(("messages",), _messages, ("system",)),
    Shape(("conversations",), _conversations, ("system",)),
    Shape(("instruction", "output"), _alpaca, ("input", "context", "system")),
    Shape(("instruction", "response"), _alpaca, ("input", "context", "system")),
    Shape(("prompt", "chosen"), _pair("chosen"), ("system",)),
    Shape(("prompt", "response"), _pair("response"), ("system",)),
    Shape(("prompt", "completion"), _pair("completion"), ("system",)),
    Shape(("question", "answer"), _pair("answer", "question"), ("system",)),
    Shape(("prompt",), _prompt_only, ("system",)),
    Shape(("text",), _plain_text),
)
