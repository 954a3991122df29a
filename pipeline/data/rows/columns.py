"""Columns of a row: turns in the forms that chat data come in, labels, ties, winners and ranks."""

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from pipeline.data.examples import Message, Role
from pipeline.data.rows.dialogues import Turns, join_turns, parse_dialogue
from pipeline.data.rows.sources import Row
from pipeline.system.errors import DataError

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
}
_TOOL_ROLES = {
    *("tool", "tool_call", "tool_response", "tool_result", "function", "function_call"),
    *("observation", "ipython"),
}
_TOOL_KEYS = ("tool_calls", "function_call")

NO_ANSWER = "in which no assistant answers a user"
EMPTY_RESPONSE = "with an empty response"
TOOL_CALLS = "with tool calls, which no step trains on"
ALL_TIED = "whose ranked responses are all as good as each other"
ZERO_WEIGHT = "of weight 0"
MIXED_WEIGHTS = "with neighbouring assistant turns of different weight"
BAD_LABEL = "whose label says that the response is bad"
NO_TARGETS = "in which every assistant turn has weight 0"


class LeftOut(Exception):  # noqa: N818 - no error: the row is skipped and counted
    """A row holds nothing that can be trained on; the argument completes "rows ..."."""


@dataclass
class Reading:
    """What became of the rows that were read."""

    left_out: Counter[str] = field(default_factory=Counter)
    """Rows by the reason why they are not used."""

    no_demonstrations: Counter[str] = field(default_factory=Counter)
    """Rows by the reason why their prompt is used, and their response is not."""

    columns: set[str] = field(default_factory=set)
    """All columns that rows have."""

    used: set[str] = field(default_factory=set)
    """Those whose values became part of an example."""


class Columns(Mapping[str, Any]):
    """The columns of one row, which remember which of them were read."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._columns = columns
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401
        value = self._columns[name]
        self.read.add(name)
        return value

    def __contains__(self, name: object) -> bool:
        """Whether there is such a column; asking does not read it."""
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def names(of: Collection[str]) -> str:
    """Names for a sentence."""
    return ", ".join(sorted(of)) or "none"


def text(row: Row, name: str) -> str:
    """A column of text."""
    value = row.columns[name]
    if not isinstance(value, str):
        raise DataError(
            f"{row.origin}: {name} must be text, got {type(value).__name__};"
            " name another column with --fields or mend the row"
        )
    return value


def is_turns(value: object) -> bool:
    """Whether a column holds turns: a list of them, or one by itself."""
    if isinstance(value, dict):
        return not {"role", "from"}.isdisjoint(value)
    return isinstance(value, list) or _as_json(value) is not None


def turns(row: Row, name: str) -> Turns:
    """The turns in a column of {"role", "content"} or ShareGPT's {"from", "value"} objects.

    Raises:
        LeftOut: there are tool calls among them.
        DataError: it holds something else.
    """
    value = row.columns[name]
    items = [value] if isinstance(value, dict) else _as_json(value) or value
    if not isinstance(items, list):
        raise DataError(
            f"{row.origin}: {name} must be a list of turns, got {type(value).__name__};"
            " name another column with --fields or mend the row"
        )
    joined = join_turns([_turn(row, name, turn) for turn in items])
    if any(one.role == two.role for one, two in pairwise(joined)):
        raise LeftOut(MIXED_WEIGHTS)
    return joined


def _as_json(value: object) -> list[Any] | None:
    """The list of turns that a text holds as JSON, as CSV files have it; None for other text."""
    if not isinstance(value, str) or not value.lstrip().startswith("[{"):
        return None
    try:
        items = json.loads(value)
    except ValueError:
        return None
    return (
        items
        if all(isinstance(item, dict) and {"role", "from"} & {*item} for item in items)
        else None
    )


def _turn(row: Row, name: str, turn: object) -> Message:
    if isinstance(turn, dict):
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if role in _TOOL_ROLES or any(turn.get(key) for key in _TOOL_KEYS):
            raise LeftOut(TOOL_CALLS)
        if isinstance(content, list):  # parts, as multi-modal chats have them
            parts = [part.get("text") if isinstance(part, dict) else part for part in content]
            texts = [part for part in parts if isinstance(part, str)]
            content = "".join(texts) if len(texts) == len(parts) else None
        if role in ROLES and isinstance(content, str):
            trained = _trained(row, name, turn) if ROLES[role] == "assistant" else True
            return Message(ROLES[role], content, trained)
        if isinstance(content, str):
            raise DataError(
                f"{row.origin}: {name} has a turn of role {role!r};"
                f" roles are {names(ROLES)}: leave such rows out"
            )
    raise DataError(
        f'{row.origin}: a turn in {name} must be {{"role": ..., "content": ...}} or'
        f' {{"from": ..., "value": ...}} with text, got {str(turn)[:80]}'
    )


def _trained(row: Row, name: str, turn: Mapping[str, Any]) -> bool:
    """Whether an assistant turn is learned: `weight` 0 or 1, as OpenAI's files have it."""
    weight = turn.get("weight")
    if weight not in (None, 0, 1):
        raise DataError(
            f"{row.origin}: {name} has a turn of weight {weight!r}; a turn is learned (1) or not"
            " (0)"
        )
    return weight != 0


def prompt(row: Row, name: str = "prompt") -> Turns:
    """A prompt column: turns, a "Human: ... Assistant:" text, or the text of one user turn."""
    if is_turns(row.columns[name]):
        return with_system(row, turns(row, name))
    question = text(row, name)
    return with_system(row, parse_dialogue(question) or (Message("user", question),))


def with_system(row: Row, dialogue: Turns) -> Turns:
    """The dialogue with the column `system` in front of it, where the row has one."""
    if not row.columns.get("system"):
        return dialogue
    return (Message("system", text(row, "system")), *dialogue)


def response(row: Row, name: str) -> Turns:
    """A response column: turns, or the text of one assistant turn."""
    if is_turns(row.columns[name]):
        return turns(row, name)
    return (Message("assistant", text(row, name).strip()),)


def dialogue(row: Row, name: str) -> Turns | None:
    """The column as a whole dialogue, from its first user turn on; None if it is a response."""
    if is_turns(row.columns[name]):
        found = turns(row, name)
        return found if found and found[0].role != "assistant" else None
    return parse_dialogue(text(row, name))


def history(row: Row) -> Turns:
    """Earlier turns in a column `history`: pairs of a user's and an assistant's message."""
    pairs = row.columns.get("history") or []
    if isinstance(pairs, str):
        try:
            pairs = json.loads(pairs)
        except ValueError:
            pairs = None
    if not isinstance(pairs, list) or not all(map(_is_pair, pairs)):
        raise DataError(
            f'{row.origin}: history must be a list of pairs ["question", "answer"];'
            " mend the row or leave the column out"
        )
    return tuple(
        Message(role, content)
        for pair in pairs
        for role, content in zip(("user", "assistant"), pair, strict=True)
    )


def _is_pair(value: object) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    return all(isinstance(content, str) for content in value)


Label = bool | int | float | str

_WINNERS: dict[str, Literal["a", "b", "tie"]] = {
    "a": "a",
    "model_a": "a",
    "b": "b",
    "model_b": "b",
    "tie": "tie",
    "tie (bothbad)": "tie",
}
_YES_OR_NO = {"true": True, "false": False, "1": True, "0": False}


def label_of(row: Row) -> Label | None:
    """The column `label` (`kto_tag` in LLaMA-Factory); None where the row has none.

    Texts that are numbers, or true and false, are these, as CSV files have them.

    Raises:
        DataError: it is a list, an object, or a number that is not finite.
    """
    name = "kto_tag" if "kto_tag" in row.columns else "label"
    if name not in row.columns:
        return None
    value = row.columns[name]
    if isinstance(value, str):
        value = _parse_label(value.strip())
    if not isinstance(value, bool | int | float | str):
        raise DataError(
            f"{row.origin}: {name} must be the name of a class or a number, got"
            f" {type(value).__name__}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{row.origin}: {name} must be finite, got {value}")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _parse_label(word: str) -> Label:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        number = float(word)
    except ValueError:
        return word
    return number if math.isfinite(number) else word


def tie_of(row: Row) -> bool:
    """Whether the column `tie` says that the order of two responses means nothing."""
    if "tie" not in row.columns:
        return False
    value = row.columns["tie"]
    found = _YES_OR_NO.get(str(value).strip().lower())
    if found is None:
        raise DataError(f"{row.origin}: tie must be true or false, got {value!r}")
    return found


def winner_of(row: Row) -> Literal["a", "b", "tie"]:
    """The column `winner` of a comparison: a, b (also model_a, model_b), or tie."""
    value = row.columns["winner"]
    found = _WINNERS.get(str(value).strip().lower())
    if found is None:
        raise DataError(f"{row.origin}: winner must be a, b or tie, got {value!r}")
    return found


def ranks_of(row: Row) -> list[float]:
    """The rank of each of the row's `responses`, 1 for the best; equal ranks are ties.

    They are the column `ranks`, or follow from `scores`, the higher the better.

    Raises:
        DataError: there are fewer than two responses, or not as many numbers as responses.
    """
    responses = row.columns["responses"]
    if not isinstance(responses, list) or len(responses) < 2:
        raise DataError(f"{row.origin}: responses must be a list of two or more")
    name = "ranks" if "ranks" in row.columns else "scores"
    numbers = row.columns[name]
    is_numbers = isinstance(numbers, list) and all(
        isinstance(each, int | float) and not isinstance(each, bool) and math.isfinite(each)
        for each in numbers
    )
    if not is_numbers or len(numbers) != len(responses):
        raise DataError(
            f"{row.origin}: {name} must be a list of {len(responses)} numbers, one for each"
            " response"
        )
    worth = [-each for each in numbers] if name == "scores" else numbers
    return [1.0 + sum(other < each for other in worth) for each in worth]


def best_first(ranks: Sequence[float]) -> list[int]:
    """The places of ranks, the best first, equal ones in their order."""
    return sorted(range(len(ranks)), key=lambda place: ranks[place])
