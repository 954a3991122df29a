"""Columns of a row: turns in the common forms of chat data, labels and ties."""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from pipeline.config import parse_literal
from pipeline.data.examples import REASONING, Message, Role
from pipeline.data.rows.sources import Row, require_characters
from pipeline.system.errors import DataError

Turns = tuple[Message, ...]

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "tool_response": "tool",
    "tool_result": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "tool_call": "assistant",
    "function_call": "assistant",
}
_CALLS = ("tool_calls", "tool_call", "function_call")
"""Keys of a turn with tool calls, and roles of turns whose content is a call."""
_LEARNED = ("weight", "loss", "train", "training")
"""Keys for whether a turn is trained on, in files for OpenAI, ms-swift and Axolotl."""
_MASKS = re.compile("(^|_)(train|loss|mask|ignore)")
"""Pattern of other keys that seem to have this meaning, which are refused."""
_WITH_TEXT = {"content", "value", *_CALLS}
_OF_TOOLS = ("name", "tool_call_id")
_KEYS = {"role", "from", *_WITH_TEXT, *_LEARNED}

FIX = "choose another column with --fields or fix the row"
AS_LINES = "save the rows as JSON lines, in pandas by to_json(orient='records', lines=True)"
NO_ANSWER = "with no assistant turn after a user turn"
EMPTY_RESPONSE = "with an empty response"


class LeftOut(Exception):  # noqa: N818 - no error: the row is skipped and counted
    """A row has nothing to train on; the message completes "rows ..."."""


# The format of hh-rlhf: "\n\nHuman: ...\n\nAssistant: ...".
_MARKER = re.compile(r"(?:\r?\n){2}(Human|Assistant):")
# The format of DeepSpeed-Chat's prompts, on one line: " Human: ... Assistant:".
_WORD = re.compile(r"\s(Human|Assistant):")
_LAST = re.compile(r"\s(Assistant):(?!.*\sAssistant:)", re.DOTALL)

# The start of stringified turns: `[{"role": ...`, `{'content': ...`, `array([{'role': ...`.
_TURNS_AS_TEXT = re.compile(
    r"""\s*((\w+\.)?(array|list|tuple)\(\s*)?([\[(]\s*)*"""
    r"""\{\s*(?P<quote>['"])(?P<key>\w+)(?P=quote)\s*:"""
)


def parse_dialogue(text: str) -> Turns | None:
    """Return the turns of a "Human: ... Assistant: ..." text; None for other texts.

    An empty "Assistant:" at the end only prompts for the response and is not a turn; the text
    before such a dialogue is its system message.
    """
    system, *pieces = _MARKER.split("\n\n" + text.strip())
    if pieces[:1] != ["Human"] or (system and pieces[-2:] != ["Assistant", ""]):
        return None
    if len(pieces) == 2:
        _, *words = _WORD.split(f" Human:{pieces[1]}")
        in_turn = all(one != two for one, two in pairwise(words[::2]))
        pieces = words if in_turn else ["Human", *_LAST.split(pieces[1])]
    messages = [
        Message("user" if name == "Human" else "assistant", content.strip())
        for name, content in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    if messages[-1] == Message("assistant", ""):
        messages.pop()
    return join_turns([*([Message("system", system.strip())] if system else []), *messages])


def join_turns(messages: Sequence[Message]) -> Turns:
    """Join consecutive messages of one role, which many chat formats refuse, with a blank line."""
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
    """Whether a turn is an assistant turn without text or tool calls."""
    return turn.role == "assistant" and not turn.content.strip() and not turn.calls


def last_response(turns: Turns) -> tuple[Turns, Turns]:
    """Split a dialogue into prompt and response, its last assistant turn.

    A dialogue that ends in a user turn is a prompt without a response.
    """
    if turns and turns[-1].role == "assistant":
        return turns[:-1], turns[-1:]
    return turns, ()


def common_prompt(chosen: Turns, rejected: Turns) -> tuple[Turns, Turns, Turns]:
    """Split two full dialogues into (prompt, chosen, rejected); the prompt is their common prefix.

    The prompt ends in the turn of a user or a tool, and each response in an assistant turn.

    Raises:
        LeftOut: they share no user turn, or one has no response to the last that they share.
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
        answers = [place for place, turn in enumerate(turns) if turn.role == "assistant"]
        responses.append(turns[: answers[-1] + 1] if answers else ())
    if not shared:
        raise LeftOut("with two dialogues that share no prompt")
    if not all(responses):
        raise LeftOut(NO_ANSWER)
    return chosen[:shared], responses[0], responses[1]


def names(of: Collection[str]) -> str:
    """Names joined for a sentence."""
    return ", ".join(sorted(of)) or "none"


def text(row: Row, name: str) -> str:
    """Return the text in a column."""
    value = row.columns.get(name)
    if not isinstance(value, str):
        fix = AS_LINES if isinstance(value, dict) else FIX
        raise DataError(f"{row.origin}: {name} must be text, got {type(value).__name__}; {fix}")
    return value


def _items(row: Row, name: str) -> list[Any] | None:
    """Return the turns in a column: a list or one turn, possibly as JSON; None for other text."""
    value = row.columns[name]
    if isinstance(value, dict):
        return [value] if not {"role", "from"}.isdisjoint(value) else None
    if not isinstance(value, str):
        return value if isinstance(value, list) else None
    begin = _TURNS_AS_TEXT.match(value)
    if begin is None:
        return None
    items = parse_literal(value)
    if not isinstance(items, str):
        items = list(items) if isinstance(items, list | tuple) else [items]
        keys = [set(item) if isinstance(item, dict) else set[str]() for item in items]
        if not all(each & {"role", "from"} and each & _WITH_TEXT for each in keys):
            return None
        require_characters(items, row.origin)
        return items
    if begin["key"] not in _KEYS.union(REASONING):
        return None
    raise DataError(
        f"{row.origin}: {name} has turns as a string that is neither JSON nor a Python literal;"
        f" {AS_LINES}"
    )


def turns(row: Row, name: str) -> Turns:
    """Return the turns in a column of {"role", "content"} or ShareGPT's {"from", "value"} objects.

    Raises:
        LeftOut: only some of several adjacent assistant turns are trained.
        DataError: the column holds something else.
    """
    items = _items(row, name)
    if items is None:
        raise DataError(
            f"{row.origin}: {name} must be a list of turns, got {type(row.columns[name]).__name__};"
            f" {FIX}"
        )
    joined = join_turns([_turn(row, name, turn) for turn in items])
    if any(one.role == two.role != "tool" for one, two in pairwise(joined)):
        raise LeftOut("with adjacent assistant turns of different weight")
    return joined


def from_first_user(row: Row, dialogue: Turns) -> Turns:
    """The dialogue without an assistant turn at its start, which has no prompt."""
    system = dialogue[:1] if dialogue and dialogue[0].role == "system" else ()
    rest = dialogue[len(system) :]
    if not rest or rest[0].role != "assistant":
        return dialogue
    row.remarks.add("the assistant turn at the start is dropped")
    return (*system, *rest[1:])


def _turn(row: Row, name: str, item: object) -> Message:
    turn: dict[str, Any] = item if isinstance(item, dict) else {"": item}
    given = str(turn.get("role", turn.get("from")))
    role = ROLES.get(given.lower())
    calls, turn = _calls(row, turn, given)
    content, reasoning = _texts(turn)
    if role is None or content is None or reasoning is None:
        wanted = f"a role of {names(ROLES)}" if role is None else "a string as content"
        raise DataError(
            f'{row.origin}: a turn in {name} must be {{"role": ..., "content": ...}} or'
            f' {{"from": ..., "value": ...}} with {wanted}, got {str(item)[:80]}'
        )
    further = {"assistant": {*REASONING}, "tool": {*_OF_TOOLS}}.get(role, set[str]())
    unknown = {key for key in turn.keys() - _KEYS - further if turn[key] is not None}
    if masks := [key for key in unknown if _MASKS.search(str(key))]:
        raise DataError(
            f"{row.origin}: {name} has a turn with the key {masks[0]}, which is not supported;"
            ' mark turns that are not trained on with "weight": 0, or remove the key'
        )
    row.unused.update(f"{name}[].{key}" for key in unknown)
    learned = {key: turn[key] for key in _LEARNED if turn.get(key) is not None}
    wrong = [f"{key} {value!r}" for key, value in learned.items() if value not in (0, 1)]
    if wrong:
        raise DataError(
            f"{row.origin}: {name} has a turn of {wrong[0]}; a turn is trained on (1 or true) or"
            " not (0 or false)"
        )
    if role == "assistant":
        keys = _as_json(row, {"tool_calls": calls}) if calls else ""
        return Message(role, content, all(learned.values()), reasoning, keys=keys)
    if any(learned.values()):
        row.remarks.add(f"turns of the {role} are marked as trained, but only the assistant's are")
    of_tool = {key: turn[key] for key in _OF_TOOLS if role == "tool" and turn.get(key)}
    return Message(role, content, keys=json.dumps(of_tool) if of_tool else "")


def _calls(row: Row, turn: dict[str, Any], role: str) -> tuple[list[Any], dict[str, Any]]:
    """The tool calls of a turn, in the form of `tool_calls`, and the turn with its text."""
    found = [turn[key] for key in _CALLS if turn.get(key)]
    if role in _CALLS:
        found, turn = [turn.get("content", turn.get("value"))], {**turn, "content": ""}
    elif found and turn.get("content", turn.get("value")) is None:
        turn = {**turn, "content": ""}
    given = _without_null(parse_literal(found[0])) if found else []
    calls: list[dict[str, Any]] = []
    for call in given if isinstance(given, list) else [given]:
        function = call.get("function", call) if isinstance(call, dict) else {}
        arguments = parse_literal(function.get("arguments") or {})
        if not isinstance(arguments, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f'{row.origin}: a tool call must have a name and arguments, {{"name": ...,'
                f' "arguments": {{...}}}}, got {str(call)[:80]}'
            )
        function = {"name": function["name"], "arguments": arguments}
        known = {"id": call["id"]} if call.get("id") else {}
        calls.append({**known, "type": "function", "function": function})
    return calls, turn


def with_tools(row: Row, dialogue: Turns) -> Turns:
    """The dialogue with the row's `tools`, as JSON schemas, in its first turn."""
    tools = _without_null(parse_literal(row.columns.get("tools") or []))
    if not tools or not dialogue:
        return dialogue
    tools = tools if isinstance(tools, list) else [tools]
    functions = [tool.get("function", tool) if isinstance(tool, dict) else {} for tool in tools]
    if not all(isinstance(function.get("name"), str) for function in functions):
        raise DataError(
            f"{row.origin}: tools must be a list of JSON schemas, each with a name, got"
            f" {str(row.columns['tools'])[:80]}; rename the column if it has another meaning"
        )
    schemas = [{"type": "function", "function": function} for function in functions]
    first, *rest = dialogue
    keys = {**json.loads(first.keys or "{}"), "tools": schemas}
    return (replace(first, keys=_as_json(row, keys)), *rest)


def _as_json(row: Row, value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    require_characters(text, row.origin)  # escapes inside JSON that a column has as text
    return text


def _without_null(value: object) -> Any:  # noqa: ANN401
    """The value without nulls: in tables, every object has the keys of all rows."""
    if isinstance(value, dict):
        return {key: _without_null(of) for key, of in value.items() if of is not None}
    return [_without_null(each) for each in value] if isinstance(value, list) else value


def _texts(turn: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Content and reasoning of a turn, possibly in typed parts; None for what is not text."""
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
        if not all(isinstance(each, str) for each in (*thoughts, *texts)):
            return None, None
        content, reasoning = "".join(map(str, texts)), reasoning or "".join(map(str, thoughts))
    both = isinstance(content, str) and isinstance(reasoning, str)
    return (content, reasoning) if both else (None, None)


def prompt(row: Row, name: str = "prompt") -> Turns:
    """Return a prompt column: turns, a "Human: ... Assistant:" text, or one user turn's text.

    An assistant turn at its end is the beginning of the response; it is not trained on.
    """
    if _items(row, name) is not None:
        found = turns(row, name)
    else:
        question = text(row, name)
        found = parse_dialogue(question) or (Message("user", question),)
    found = with_system(row, from_first_user(row, found))
    if not found or found[-1].role != "assistant":
        return found
    *before, begun = found
    if begun.calls or (begun.reasoning and is_empty(begun)):
        raise LeftOut("whose prompt ends with reasoning or a tool call alone")
    if is_empty(begun):
        return tuple(before)
    row.remarks.add("the prompt ends with an assistant turn, which the response continues")
    return (*before, replace(begun, trained=False))


def with_system(row: Row, dialogue: Turns) -> Turns:
    """Begin the dialogue with the column `system` if the row has one."""
    if not row.columns.get("system"):
        return dialogue
    system = Message("system", text(row, "system"))
    return dialogue if dialogue[:1] == (system,) else join_turns((system, *dialogue))


def response(row: Row, name: str, question: Turns) -> Turns:
    """Return a response column: turns, without `question` before them, or one turn's text."""
    if _items(row, name) is not None:
        found = turns(row, name)
        return found[len(question) :] if found[: len(question)] == question else found
    content = text(row, name).rstrip()
    begun = bool(question) and question[-1].role == "assistant"
    return (Message("assistant", content if begun else content.lstrip()),)


def dialogue(row: Row, name: str) -> Turns | None:
    """Return the column as a full dialogue that begins with a user turn; None for a response."""
    if _items(row, name) is not None:
        found = turns(row, name)
        return found if found and found[0].role != "assistant" else None
    return parse_dialogue(text(row, name))


Label = bool | int | float | str


def label_column(columns: Mapping[str, Any]) -> str:
    """Name of the column that holds the label: `label`, or LLaMA-Factory's `kto_tag`."""
    return "kto_tag" if "kto_tag" in columns else "label"


def read_label(row: Row) -> Label | None:
    """Return the row's label; None if it has none.

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


def number(row: Row, name: str) -> float:
    """Return the finite number in a column."""
    value = row.columns[name]
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise DataError(f"{row.origin}: {name} must be a finite number, got {value!r}")
    return found


def read_tie(row: Row) -> bool:
    """Whether the column `tie` marks the two responses as equally good."""
    word = str(row.columns.get("tie", False)).strip().lower()
    if word not in ("true", "1", "false", "0"):
        raise DataError(f"{row.origin}: tie must be true or false, got {word!r}")
    return word in ("true", "1")
