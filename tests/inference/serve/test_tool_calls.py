"""Calls of tools in text: the same however the text comes, and text where there is no call."""

import json
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from inference.serve.tool_calls import CallParser
from inference.serve.tool_formats import HERMES, LLAMA3, MISTRAL, ToolFormat, format_of

NAMES = ("add", "look_up")
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}'
LOOK_UP = '{"name": "look_up", "arguments": {"text": "a \\"{\\" and \\\\"}}'
LLAMA_ADD = ADD.replace("arguments", "parameters")
OTHER = '{"name": "remove", "arguments": {}}'

Calls = list[tuple[str, str]]


def read(form: ToolFormat, parts: Sequence[str]) -> tuple[str, Calls]:
    """The content, and name and arguments of each call."""
    parser = CallParser(form, NAMES)
    deltas = [delta for part in parts for delta in parser.add(part)] + parser.finish()
    content, calls = "", []
    for delta in deltas:
        content += delta.content
        if delta.name is not None:
            assert delta.call == len(calls)
            calls.append([delta.name, ""])
        if delta.call is not None:
            calls[delta.call][1] += delta.arguments
    assert parser.num_calls == len(calls)
    return content, [(name, arguments) for name, arguments in calls]


def called(*texts: str) -> Calls:
    found = [json.loads(text) for text in texts]
    return [(each["name"], json.dumps(each["arguments"])) for each in found]


TEXTS = [
    (HERMES, "Hi there. ", "Hi there. ", []),
    (HERMES, f"<tool_call>\n{ADD}\n</tool_call>", "", called(ADD)),
    (HERMES, f"Yes.\n<tool_call>\n{ADD}\n</tool_call>\n", "Yes.", called(ADD)),
    (
        HERMES,
        f"<tool_call>{LOOK_UP}</tool_call>\n<tool_call>\n{ADD}\n</tool_call>",
        "",
        called(LOOK_UP, ADD),
    ),
    (HERMES, f"<tool_call>{ADD}</tool_call> Done.", " Done.", called(ADD)),
    (HERMES, f"<tool_call>{OTHER}</tool_call>", f"<tool_call>{OTHER}</tool_call>", []),
    (HERMES, "<tool_call> no", "<tool_call> no", []),
    (HERMES, "a <tool_cal", "a <tool_cal", []),
    (HERMES, '<tool_call>{"name": "add", "argu', '<tool_call>{"name": "add", "argu', []),
    # Cut at the longest response: what there is of the arguments.
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
    (HERMES, f"<tool_call>{ADD}", "", called(ADD)),
    # Fields in another order, and arguments as a string.
    (
        HERMES,
        '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    (MISTRAL, f"[TOOL_CALLS] [{ADD}, {LOOK_UP}]", "", called(ADD, LOOK_UP)),
    (MISTRAL, f'[TOOL_CALLS] [{ADD[:-1]}, "id": "a}}]"}}, {LOOK_UP}]', "", called(ADD, LOOK_UP)),
    (MISTRAL, f'[TOOL_CALLS] [{ADD[:-1]}, "id": "a', "", called(ADD)),
    (HERMES, f"<tool_call>{ADD[:-1]}</tool_call>", "", called(ADD)),
    (MISTRAL, f"Well. [TOOL_CALLS][{ADD}]", "Well.", called(ADD)),
    (MISTRAL, "[TOOL_CALLS] none", "[TOOL_CALLS]none", []),
    (MISTRAL, f"[{ADD}]", f"[{ADD}]", []),
    (LLAMA3, LLAMA_ADD, "", called(ADD)),
    (LLAMA3, f"<|python_tag|>{LLAMA_ADD}; {LLAMA_ADD}", "", called(ADD, ADD)),
    (LLAMA3, f'{{"type": "function", {LLAMA_ADD[1:]}', "", called(ADD)),
    (LLAMA3, f"It is {LLAMA_ADD}", f"It is {LLAMA_ADD}", []),
    (LLAMA3, '{"a": 1} is JSON', '{"a": 1} is JSON', []),
    (LLAMA3, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (LLAMA3, " ", " ", []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), TEXTS)
def test_calls_are_taken_out_of_a_text(
    form: ToolFormat, text: str, content: str, calls: Calls
) -> None:
    assert read(form, [text]) == (content, calls)


@pytest.mark.parametrize("seed", range(3))
def test_a_text_in_pieces_is_read_as_the_whole(seed: int) -> None:
    chance = random.Random(seed)
    for form, text, content, calls in TEXTS:
        for count in (1, 2, 5, len(text)):
            inner = [chance.randrange(len(text)) for _ in range(count)]
            places = sorted({0, len(text), *inner})
            parts = [text[begin:end] for begin, end in pairwise(places)]
            assert read(form, parts) == (content, calls), parts


@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA3], ids=lambda form: form.name)
def test_no_text_is_an_error_and_none_is_read_otherwise_in_pieces(form: ToolFormat) -> None:
    words = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<tool", "name", ": "]
    words += ["[", "]", ",", ";", "{", "}", '"', "\\", " ", "\n", "x", ADD, LLAMA_ADD, OTHER]
    chance = random.Random(1)
    found: set[int] = set()
    for _ in range(1500):
        parts = chance.choices(words, k=chance.randrange(1, 12))
        whole = read(form, ["".join(parts)])
        assert read(form, parts) == whole, parts
        assert read(form, list("".join(parts))) == whole, parts
        found.add(len(whole[1]))
    assert found >= {0, 1}


def test_arguments_come_before_their_call_has_ended() -> None:
    parser = CallParser(HERMES, NAMES)
    begin, first = parser.add('<tool_call>{"name": "add", "arguments": {"a": ')

    assert (begin.call, begin.name, begin.arguments) == (0, "add", "")
    assert (first.call, first.name, first.arguments) == (0, None, '{"a": ')
    assert [each.arguments for each in parser.add("12")] == ["12"]


def test_a_template_shows_how_calls_are_written() -> None:
    assert format_of("{{ tools }} <tool_call>") is HERMES
    assert format_of("{{ tools }} [TOOL_CALLS]") is MISTRAL
    assert format_of("{{ tools }} ipython, respond with parameters") is LLAMA3
    for unknown in ("{{ tools }}", "<tool_call><function=f>", "[TOOL_CALLS]f[ARGS]{}"):
        assert format_of(unknown) is None
