"""Read the columns of a row: labels, ties, and turns in common chat formats."""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from pipeline.config import parse_literal
from pipeline.data.examples import REASONING, Message, Role
from pipeline.data.rows.sources import Row, reject_surrogates
from pipeline.system.errors import DataError

Turns = tuple[Message, ...]

_ROLE_NAMES: Mapping[Role, Sequence[str]] = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "bot", "model", "tool_call", "function_call"),
    "tool": ("tool", "tool_response", "tool_result", "function", "observation", "ipython"),
}
ROLES: dict[str, Role] = {name: role for role, names in _ROLE_NAMES.items() for name in names}
_CALL_KEYS = ("tool_calls", "tool_call", "function_call")
"""Keys of a turn that hold tool calls, and roles of turns whose content is a call."""
_TRAIN_KEYS = ("weight", "loss", "train", "training")
"""Keys that mark whether a turn is trained on, in files for OpenAI, ms-swift and Axolotl."""
_UNSUPPORTED_TRAIN_KEY = re.compile("(^|_)(train|loss|mask|ignore)")
"""Pattern of other keys that seem to have this meaning; they are rejected."""
_TEXT_KEYS = {"content", "value", *_CALL_KEYS}
_TOOL_KEYS = ("name", "tool_call_id")
_TURN_KEYS = {"role", "from", *_TEXT_KEYS, *_TRAIN_KEYS}

FIX = "choose another column with --fields or fix the row"
SAVE_AS_LINES = "save the rows as JSON lines, in pandas with to_json(orient='records', lines=True)"
NO_ANSWER = "with no assistant turn after a user turn"
EMPTY_RESPONSE = "with an empty response"


class SkipRow(Exception):  # noqa: N818 - not an error: the row is skipped and counted
    """Raised to skip and count a row; the message completes "rows ..."."""


# The format of hh-rlhf: "\n\nHuman: ...\n\nAssistant: ...".
_MARKER = re.compile(r"(?:\r?\n){2}(Human|Assistant):")
# The format of DeepSpeed-Chat's prompts, on one line: " Human: ... Assistant:".
_INLINE_MARKER = re.compile(r"\s(Human|Assistant):")
_LAST_ASSISTANT = re.compile(r"\s(Assistant):(?!.*\sAssistant:)", re.DOTALL)

# The start of stringified turns: `[{"role": ...`, `{'content': ...`, `array([{'role': ...`.
_TURNS_AS_TEXT = re.compile(
    r"""\s*((\w+\.)?(array|list|tuple)\(\s*)?([\[(]\s*)*"""
    r"""\{\s*(?P<quote>['"])(?P<key>\w+)(?P=quote)\s*:"""
)


def parse_dialogue(text: str) -> Turns | None:
    """Return the turns of a "Human: ... Assistant: ..." text, or None for other texts.

    An empty "Assistant:" at the end only prompts for the response and is not a turn; if the text
    ends this way, it may begin with a system message.
    """
    system, *pieces = _MARKER.split("\n\n" + text.strip())
    if pieces[:1] != ["Human"] or (system and pieces[-2:] != ["Assistant", ""]):
        return None
    if len(pieces) == 2:
        _, *inline_pieces = _INLINE_MARKER.split(f" Human:{pieces[1]}")
        alternates = all(first != second for first, second in pairwise(inline_pieces[::2]))
        pieces = inline_pieces if alternates else ["Human", *_LAST_ASSISTANT.split(pieces[1])]
    messages = [
        Message("user" if name == "Human" else "assistant", content.strip())
        for name, content in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    if messages[-1] == Message("assistant", ""):
        messages.pop()
    return join_turns([*([Message("system", system.strip())] if system else []), *messages])


def join_turns(messages: Sequence[Message]) -> Turns:
    """Join adjacent messages of one role, except tool, by blank lines; many formats reject them."""
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined and message.role != "tool" else None
        if last and (last.role, last.trained) == (message.role, message.trained):
            content = f"{last.content}\n\n{message.content}".strip("\n")
            reasoning = f"{last.reasoning}\n\n{message.reasoning}".strip("\n")
            calls = [*last.calls, *message.calls]
            keys = json.dumps({"tool_calls": calls}, ensure_ascii=False) if calls else ""
            joined[-1] = replace(last, content=content, reasoning=reasoning, keys=keys)
        else:
            joined.append(message)
    return tuple(joined)


def is_empty(turn: Message) -> bool:
    """Return whether a turn is an assistant turn without text or tool calls."""
    return turn.role == "assistant" and not turn.content.strip() and not turn.calls


def split_last_response(turns: Turns) -> tuple[Turns, Turns]:
    """Split a dialogue into the prompt and the response: the last turn, if it is the assistant's.

    A dialogue that ends in another turn is a prompt without a response.
    """
    return (turns[:-1], turns[-1:]) if turns and turns[-1].role == "assistant" else (turns, ())


def split_common_prompt(chosen: Turns, rejected: Turns) -> tuple[Turns, Turns, Turns]:
    """Split two full dialogues into (prompt, chosen, rejected); the prompt is their common prefix.

    The prompt ends in the turn of a user or a tool, and each response in an assistant turn.

    Raises:
        SkipRow: the dialogues share no prompt, or one of them has no response to it.
    """
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    while shared and chosen[shared - 1].role not in ("user", "tool"):
        shared -= 1
    # Drop turns after the last response, but only past the shared prompt: if an unanswered dialogue
    # shortened the prompt, the other's last shared turn would become a response.
    responses: list[Turns] = []
    for turns in (chosen[shared:], rejected[shared:]):
        assistant_indices = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
        responses.append(turns[: assistant_indices[-1] + 1] if assistant_indices else ())
    if not shared:
        raise SkipRow("with two dialogues that share no prompt")
    if not all(responses):
        raise SkipRow(NO_ANSWER)
    return chosen[:shared], responses[0], responses[1]


def join_names(names: Collection[str]) -> str:
    """Join names for use in a sentence."""
    return ", ".join(sorted(names)) or "none"


def read_text(row: Row, name: str) -> str:
    """Return the text in a column."""
    value = row.columns.get(name)
    if not isinstance(value, str):
        fix = SAVE_AS_LINES if isinstance(value, dict) else FIX
        raise DataError(f"{row.origin}: {name} must be text, got {type(value).__name__}; {fix}")
    return value


def _turn_items(row: Row, name: str) -> list[Any] | None:
    """Return a column's turns, read from a list, one turn, or text of either; otherwise None."""
    value = row.columns[name]
    if isinstance(value, dict):
        return [value] if not {"role", "from"}.isdisjoint(value) else None
    if not isinstance(value, str):
        return value if isinstance(value, list) else None
    match = _TURNS_AS_TEXT.match(value)
    if match is None:
        return None
    items = parse_literal(value)
    if not isinstance(items, str):
        items = list(items) if isinstance(items, list | tuple) else [items]
        key_sets = [set(item) if isinstance(item, dict) else set[str]() for item in items]
        if not all(keys & {"role", "from"} and keys & _TEXT_KEYS for keys in key_sets):
            return None
        reject_surrogates(items, row.origin)
        return items
    if match["key"] not in _TURN_KEYS.union(REASONING):
        return None
    raise DataError(
        f"{row.origin}: {name} is a string of turns that is neither JSON nor a Python literal;"
        f" {SAVE_AS_LINES}"
    )


def read_turns(row: Row, name: str) -> Turns:
    """Return the turns in a column of {"role", "content"} or ShareGPT's {"from", "value"} objects.

    Raises:
        SkipRow: only some of several adjacent assistant turns are trained on.
        DataError: the column holds something else.
    """
    items = _turn_items(row, name)
    if items is None:
        raise DataError(
            f"{row.origin}: {name} must be a list of turns, got {type(row.columns[name]).__name__};"
            f" {FIX}"
        )
    if any(isinstance(item, str) for item in items):
        raise DataError(f"{row.origin}: {name} is a list of texts; write one row for each of them")
    joined = join_turns([_parse_turn(row, name, turn) for turn in items])
    if any(first.role == second.role != "tool" for first, second in pairwise(joined)):
        raise SkipRow("with adjacent assistant turns of different weights")
    return joined


def drop_leading_assistant(row: Row, dialogue: Turns) -> Turns:
    """Drop the first turn after any system turn if it is the assistant's: no prompt precedes it."""
    system = dialogue[:1] if dialogue and dialogue[0].role == "system" else ()
    rest = dialogue[len(system) :]
    if not rest or rest[0].role != "assistant":
        return dialogue
    row.remarks.add("the assistant turn at the start is dropped")
    return (*system, *rest[1:])


def _parse_turn(row: Row, name: str, item: object) -> Message:
    turn: dict[str, Any] = item if isinstance(item, dict) else {"": item}
    role_name = str(turn.get("role", turn.get("from")))
    role = ROLES.get(role_name.lower())
    calls, turn = _parse_calls(row, turn, role_name)
    content, reasoning = _content_and_reasoning(turn)
    if role is None or content is None or reasoning is None:
        expected = f"one of the roles {join_names(ROLES)}" if role is None else "text as content"
        raise DataError(
            f'{row.origin}: a turn in {name} must be {{"role": ..., "content": ...}} or'
            f' {{"from": ..., "value": ...}} with {expected}, got {str(item)[:80]}'
        )
    role_keys = {"assistant": {*REASONING}, "tool": {*_TOOL_KEYS}}.get(role, set[str]())
    unknown = {key for key in turn.keys() - _TURN_KEYS - role_keys if turn[key] is not None}
    if unsupported := [key for key in unknown if _UNSUPPORTED_TRAIN_KEY.search(str(key))]:
        raise DataError(
            f"{row.origin}: {name} has a turn with the key {unsupported[0]}, which is not"
            ' supported; mark turns that are not trained on with "weight": 0, or remove the key'
        )
    row.unused.update(f"{name}[].{key}" for key in unknown)
    train_flags = {key: turn[key] for key in _TRAIN_KEYS if turn.get(key) is not None}
    invalid = [f"{key} {value!r}" for key, value in train_flags.items() if value not in (0, 1)]
    if invalid:
        raise DataError(
            f"{row.origin}: {name} has a turn with {invalid[0]}; use 1 or true for a turn that is"
            " trained on, otherwise 0 or false"
        )
    if role == "assistant":
        keys = _dump_json(row, {"tool_calls": calls}) if calls else ""
        return Message(role, content, all(train_flags.values()), reasoning, keys=keys)
    if any(train_flags.values()):
        row.remarks.add(f"{role} turns are marked as trained, but only assistant turns can be")
    tool_keys = {key: turn[key] for key in _TOOL_KEYS if role == "tool" and turn.get(key)}
    return Message(role, content, keys=json.dumps(tool_keys) if tool_keys else "")


def _parse_calls(row: Row, turn: dict[str, Any], role: str) -> tuple[list[Any], dict[str, Any]]:
    """Return a turn's calls, in chat templates' format, and the turn, whose text may be empty."""
    values = [turn[key] for key in _CALL_KEYS if turn.get(key)]
    if role in _CALL_KEYS:
        values, turn = [turn.get("content", turn.get("value"))], {**turn, "content": ""}
    elif values and turn.get("content", turn.get("value")) is None:
        turn = {**turn, "content": ""}
    parsed = _drop_nulls(parse_literal(values[0])) if values else []
    calls: list[dict[str, Any]] = []
    for call in parsed if isinstance(parsed, list) else [parsed]:
        function = _get_function(call)
        arguments = parse_literal(function.get("arguments") or {})
        if not isinstance(arguments, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f'{row.origin}: a tool call must have a name and arguments, {{"name": ...,'
                f' "arguments": {{...}}}}, got {str(call)[:80]}'
            )
        function = {"name": function["name"], "arguments": arguments}
        id_ = {"id": call["id"]} if call.get("id") else {}
        calls.append({**id_, "type": "function", "function": function})
    return calls, turn


def _get_function(value: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the `function` of a tool or call, or else the value; {} if that is not an object."""
    function = value.get("function", value) if isinstance(value, dict) else None
    return function if isinstance(function, dict) else {}


def add_tools(row: Row, dialogue: Turns) -> Turns:
    """Add the row's `tools`, as JSON schemas, to the first turn of the dialogue."""
    tools = _drop_nulls(parse_literal(row.columns.get("tools") or []))
    if not tools or not dialogue:
        return dialogue
    tools = tools if isinstance(tools, list) else [tools]
    functions = [_get_function(tool) for tool in tools]
    if not all(isinstance(function.get("name"), str) for function in functions):
        raise DataError(
            f"{row.origin}: tools must be a list of JSON schemas, each with a name, got"
            f" {str(row.columns['tools'])[:80]}; rename the column if it has another meaning"
        )
    schemas = [{"type": "function", "function": function} for function in functions]
    first, *rest = dialogue
    keys = {**json.loads(first.keys or "{}"), "tools": schemas}
    return (replace(first, keys=_dump_json(row, keys)), *rest)


def _dump_json(row: Row, value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    reject_surrogates(text, row.origin)  # JSON stored as text may have escapes
    return text


def _drop_nulls(value: object) -> Any:  # noqa: ANN401
    """Remove nulls from the value, since tables give every object the keys of all rows."""
    if isinstance(value, dict):
        return {key: _drop_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


def _content_and_reasoning(turn: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return a turn's content and reasoning, joined from any typed parts, or None if not text."""
    content = turn.get("content", turn.get("value"))
    reasoning = next((turn[key] for key in REASONING if turn.get(key)), "")
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {"text": part} for part in content]
        thoughts = [
            next((part[key] for key in (*REASONING, "text") if part.get(key) is not None), None)
            for part in parts
            if part.get("type") in REASONING
        ]
        texts = [part.get("text") for part in parts if part.get("type") not in REASONING]
        if not all(isinstance(part, str) for part in (*thoughts, *texts)):
            return None, None
        content, reasoning = "".join(map(str, texts)), reasoning or "".join(map(str, thoughts))
    are_text = isinstance(content, str) and isinstance(reasoning, str)
    return (content, reasoning) if are_text else (None, None)


def read_prompt(row: Row, name: str = "prompt") -> Turns:
    """Return a column's prompt: turns, a "Human: ... Assistant:" text, or one user turn's text.

    An assistant turn at the end is the beginning of the response and is not trained on.
    """
    if _turn_items(row, name) is not None:
        turns = read_turns(row, name)
    else:
        text = read_text(row, name)
        turns = parse_dialogue(text) or (Message("user", text),)
    turns = add_system(row, drop_leading_assistant(row, turns))
    if not turns or turns[-1].role != "assistant":
        return turns
    *before, prefill = turns
    if prefill.calls or (prefill.reasoning and is_empty(prefill)):
        raise SkipRow("whose prompt ends with a tool call or only reasoning")
    if is_empty(prefill):
        return tuple(before)
    row.remarks.add("the prompt ends with an assistant turn, which the response continues")
    return (*before, replace(prefill, trained=False))


def add_system(row: Row, dialogue: Turns) -> Turns:
    """Prepend the text of the column `system`, if the row has one, as a system turn."""
    if not row.columns.get("system"):
        return dialogue
    system = Message("system", read_text(row, "system"))
    return dialogue if dialogue[:1] == (system,) else join_turns((system, *dialogue))


def read_response(row: Row, name: str, prompt: Turns) -> Turns:
    """Return a column's response: turns without a repeated leading `prompt`, or one turn's text."""
    if _turn_items(row, name) is not None:
        turns = read_turns(row, name)
        return turns[len(prompt) :] if turns[: len(prompt)] == prompt else turns
    content = read_text(row, name).rstrip()
    continues = bool(prompt) and prompt[-1].role == "assistant"
    return (Message("assistant", content if continues else content.lstrip()),)


def read_dialogue(row: Row, name: str) -> Turns | None:
    """Return the full dialogue in a column, or None if the column has only a response."""
    if _turn_items(row, name) is not None:
        turns = read_turns(row, name)
        return turns if turns and turns[0].role != "assistant" else None
    return parse_dialogue(read_text(row, name))


Label = bool | int | float | str


def label_column(columns: Mapping[str, Any]) -> str:
    """Return the name of the label's column: `label`, or LLaMA-Factory's `kto_tag`."""
    return "kto_tag" if "kto_tag" in columns else "label"


def read_label(row: Row) -> Label | None:
    """Return the row's label, or None if it has none.

    Text that is a number, true or false is converted, because CSV files contain only text.

    Raises:
        DataError: the label is a list, an object, or a number that is not finite.
    """
    name = label_column(row.columns)
    value = row.columns.get(name)
    if value is None:
        return None
    if isinstance(value, str):
        value = _parse_label(value.strip())
    is_finite = not isinstance(value, float) or math.isfinite(value)
    if not isinstance(value, bool | int | float | str) or not is_finite:
        raise DataError(
            f"{row.origin}: {name} must be the name of a class or a finite number, got {value!r}"
        )
    return int(value) if isinstance(value, float) and value.is_integer() else value  # pyrefly: ignore[missing-attribute]


def _parse_label(word: str) -> Label:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        number = float(word)
    except ValueError:
        return word
    return number if math.isfinite(number) else word


def read_number(row: Row, name: str) -> float:
    """Return the finite number in a column."""
    value = row.columns[name]
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{row.origin}: {name} must be a finite number, got {value!r}")
    return number


def read_tie(row: Row) -> bool:
    """Return whether the column `tie` marks the two responses as equally good."""
    word = str(row.columns.get("tie", False)).strip().lower()
    try:
        number = float({"true": "1", "false": "0"}.get(word, word))
    except ValueError:
        number = math.nan
    if number not in (0.0, 1.0):
        raise DataError(f"{row.origin}: tie must be true or false, got {word!r}")
    return number == 1.0
