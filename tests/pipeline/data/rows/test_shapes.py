import json
from typing import Any

import pytest

from pipeline.data.examples import Example, Message
from pipeline.data.rows.shapes import ReadStats, drop_revoked, read_row
from pipeline.data.rows.sources import Row
from pipeline.system.errors import DataError

QUESTION, GOOD, BAD = (
    Message("user", "Q"),
    Message("assistant", "good"),
    Message("assistant", "bad"),
)
SYSTEM = Message("system", "S")
GOOD_PAIR = ("assistant", "good")


def read(fields: dict[str, str] | None = None, /, **columns: Any) -> Example | None:
    return read_row(Row(columns, "rows.jsonl line 17"), fields or {})


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


PREFERENCE_FORMATS = {
    "strings": {"prompt": "Q", "chosen": " good", "rejected": "bad"},
    "DeepSpeed-Chat": {"prompt": " Human: Q Assistant:", "chosen": " good", "rejected": " bad"},
    "rm-static": {"prompt": "\n\nHuman: Q\n\nAssistant:", "chosen": " good", "rejected": " bad"},
    "hh-rlhf": {
        "chosen": "\n\nHuman: Q\n\nAssistant: good",
        "rejected": "\n\nHuman: Q\n\nAssistant: bad",
    },
    "TRL, one response after its prompt": {
        "prompt": turns(("user", "Q")),
        "chosen": turns(("user", "Q"), ("assistant", "good")),
        "rejected": turns(("assistant", "bad")),
    },
    "hh-rlhf with a prompt column": {
        "prompt": "Q",
        "chosen": "\n\nHuman: Q\n\nAssistant: good",
        "rejected": "\n\nHuman: Q\n\nAssistant: bad",
    },
    "TRL, explicit prompt": {
        "prompt": turns(("user", "Q")),
        "chosen": turns(("assistant", "good")),
        "rejected": turns(("assistant", "bad")),
    },
    "TRL, implicit prompt": {
        "chosen": turns(("user", "Q"), ("assistant", "good")),
        "rejected": turns(("user", "Q"), ("assistant", "bad")),
    },
    "UltraFeedback": {
        "prompt": "Q",
        "messages": turns(("user", "Q"), ("assistant", "good")),
        "chosen": turns(("user", "Q"), ("assistant", "good")),
        "rejected": turns(("user", "Q"), ("assistant", "bad")),
    },
    "LLaMA-Factory, Alpaca": {"instruction": "Q", "input": "", "chosen": "good", "rejected": "bad"},
    "LLaMA-Factory, ShareGPT": {
        "conversations": [{"from": "human", "value": "Q"}],
        "chosen": {"from": "gpt", "value": "good"},
        "rejected": {"from": "gpt", "value": "bad"},
    },
    "LLaMA-Factory, messages": {
        "messages": turns(("user", "Q")),
        "chosen": turns(("assistant", "good"))[0],
        "rejected": turns(("assistant", "bad"))[0],
    },
    "turns as JSON text, as CSV files have them": {
        "chosen": '[{"role": "user", "content": "Q"}, {"role": "assistant", "content": "good"}]',
        "rejected": '[{"role": "user", "content": "Q"}, {"role": "assistant", "content": "bad"}]',
    },
}

DEMONSTRATION_FORMATS = {
    "messages": {"messages": turns(("user", "Q"), ("assistant", "good"))},
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "good"}]
    },
    "ShareGPT without its first user turn": {
        "conversations": [
            {"from": "gpt", "value": "before"},
            {"from": "human", "value": "Q"},
            {"from": "gpt", "value": "good"},
        ]
    },
    "Alpaca": {"instruction": "Q", "input": "", "output": "good"},
    "Dolly": {"instruction": "Q", "context": None, "response": "good"},
    "prompt/response": {"prompt": "Q", "response": "good"},
    "prompt/completion": {"prompt": "Q", "completion": " good"},
    "prompt/chosen": {"prompt": "Q", "chosen": "good"},
    "question/answer": {"question": "Q", "answer": "good"},
    "TRL prompt-completion": {
        "prompt": turns(("user", "Q")),
        "completion": turns(("assistant", "good")),
    },
    "capitalized roles": {"messages": turns(("User", "Q"), ("Assistant", "good"))},
    "assistant turn first": {
        "messages": turns(("assistant", "Hi!"), ("user", "Q"), ("assistant", "good"))
    },
    "turns as Python literals": {
        "prompt": "[{'role': 'user', 'content': 'Q'}]",
        "response": "{'role': 'assistant', 'content': 'good'}",
    },
    "turns as a Python tuple": {
        "messages": str(tuple(turns(("user", "Q"), ("assistant", "good"))))
    },
    "turns as indented JSON": {
        "messages": json.dumps(turns(("user", "Q"), ("assistant", "good")), indent=2)
    },
    "content as a list of parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Q"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "good"}]},
        ]
    },
}


@pytest.mark.parametrize("name", PREFERENCE_FORMATS)
def test_all_preference_formats_yield_the_same_example(name: str) -> None:
    assert read(**PREFERENCE_FORMATS[name]) == Example(
        (QUESTION,), (GOOD,), (BAD,), origin="rows.jsonl line 17"
    )


@pytest.mark.parametrize("name", DEMONSTRATION_FORMATS)
def test_all_demonstration_formats_yield_the_same_example(name: str) -> None:
    assert read(**DEMONSTRATION_FORMATS[name]) == Example(
        (QUESTION,), (GOOD,), origin="rows.jsonl line 17"
    )


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": "Q"},
        {"prompt": "\n\nHuman: Q\n\nAssistant:"},
        {"prompt": turns(("user", "Q"))},
        {"messages": turns(("user", "Q"))},
        {"prompt": "Q", "response": None},
    ],
)
def test_all_prompt_formats_yield_the_same_example(columns: dict[str, Any]) -> None:
    assert read(**columns) == Example((QUESTION,), origin="rows.jsonl line 17")


@pytest.mark.parametrize(
    "columns",
    [
        {"messages": turns(("system", "S"), ("user", "Q"), ("assistant", "good"))},
        {**DEMONSTRATION_FORMATS["ShareGPT"], "system": "S"},
        {"conversations": [
            {"from": "system", "value": "S"},
            {"from": "human", "value": "Q"},
            {"from": "gpt", "value": "good"},
        ]},
        {"instruction": "Q", "output": "good", "system": "S"},
        {"prompt": "Q", "response": "good", "system": "S"},
        {"messages": turns(("system", "S"), ("user", "Q"), GOOD_PAIR), "system": "S"},
        {"prompt": "S\n\nHuman: Q\n\nAssistant:", "response": "good"},
    ],
)  # fmt: skip
def test_system_message_comes_first(columns: dict[str, Any]) -> None:
    example = read(**columns)

    assert example is not None
    assert (example.prompt, example.chosen) == ((SYSTEM, QUESTION), (GOOD,))


@pytest.mark.parametrize(
    "text",
    [
        "\r\n\r\nHuman: Q\r\n\r\nAssistant: a\r\n\r\nHuman: R\r\n\r\nAssistant:",
        "Human: Q\nAssistant: a\nHuman: R\nAssistant:",
        " Human: Q Assistant: a Human: R Assistant: ",
    ],
)
def test_text_dialogue_is_split_into_turns(text: str) -> None:
    example = read(prompt=text, response="good")

    assert example is not None
    assert [turn.content for turn in example.prompt] == ["Q", "a", "R"]
    name = "Is Human: a name?"
    assert read(prompt=f"Human: {name} Assistant:") == read(prompt=name)


def test_response_labeled_false_is_read_as_rejected() -> None:
    stats = ReadStats()
    row = {"prompt": "Q", "completion": "bad"}

    def parse(**columns: Any) -> Example | None:
        return read_row(Row({**row, **columns}, ""), {}, stats)

    assert parse(label=True) == parse(label="true") == parse() == Example((QUESTION,), (BAD,))
    bad = Example((QUESTION,), rejected=(BAD,))
    assert parse(label=False) == parse(label="False") == bad
    assert parse(label="essay") == Example((QUESTION,), (BAD,))  # the name of a class
    tagged = read(conversations=DEMONSTRATION_FORMATS["ShareGPT"]["conversations"], kto_tag=False)
    assert tagged == Example((QUESTION,), rejected=(GOOD,), origin="rows.jsonl line 17")
    assert stats.prompt_only == {"whose label marks the response as bad": 2}


SCHEMA = {"name": "weather", "parameters": {"type": "object"}}
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
TEXT_CALL = {**CALL, "arguments": '{"city": "Oslo"}'}
TOOL_CALL_FORMATS = {
    "TRL": {
        "messages": [
            *turns(("user", "Q")),
            {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
            *turns(("tool", "22"), GOOD_PAIR),
        ],
        "tools": [{"type": "function", "function": SCHEMA}],
    },
    "OpenAI": {
        "messages": [
            *turns(("user", "Q")),
            {"role": "assistant", "content": None, "tool_calls": [{"function": TEXT_CALL}]},
            *turns(("tool", "22"), GOOD_PAIR),
        ],
        "tools": str([{"type": "function", "function": SCHEMA}]),  # as pandas writes it
    },
    "OpenAI function_call": {
        "messages": [
            *turns(("user", "Q")),
            {"role": "assistant", "content": None, "function_call": TEXT_CALL},
            *turns(("function", "22"), GOOD_PAIR),
        ],
        "tools": [SCHEMA],
    },
    "LLaMA-Factory": {
        "conversations": [
            {"from": "human", "value": "Q"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "22"},
            {"from": "gpt", "value": "good"},
        ],
        "tools": json.dumps([SCHEMA]),
    },
    "parquet, whose objects have the keys of all rows": {
        "prompt": [
            {"role": "user", "content": "Q", "tool_calls": None, "name": None},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {**CALL, "arguments": {"city": "Oslo", "day": None}}}],
                "name": None,
            },
            {"role": "tool", "content": "22", "tool_calls": None, "name": None},
        ],
        "response": "good",
        "tools": [{"type": "function", "function": {**SCHEMA, "strict": None}}],
    },
}


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_all_tool_call_formats_yield_the_same_example(name: str) -> None:
    calls = {"tool_calls": [{"type": "function", "function": CALL}]}
    tools = {"tools": [{"type": "function", "function": SCHEMA}]}

    assert read(**TOOL_CALL_FORMATS[name]) == Example(
        (
            Message("user", "Q", keys=json.dumps(tools)),
            Message("assistant", "", keys=json.dumps(calls)),
            Message("tool", "22"),
        ),
        (GOOD,),
        origin="rows.jsonl line 17",
    )


def test_consecutive_tool_calls_are_one_response_turn() -> None:
    calls = [{"role": "tool_call", "content": json.dumps({**CALL, "name": n})} for n in ("a", "b")]
    example = read(messages=[*turns(("user", "Q")), *calls])

    assert example is not None
    assert example.num_targets == 1
    assert [call["function"]["name"] for call in example.chosen[0].calls] == ["a", "b"]
    results = turns(("tool", "1"), ("tool", "2"))
    dialogue = read(messages=[*turns(("user", "Q")), *calls, *results, *turns(GOOD_PAIR)])
    assert dialogue is not None
    assert [turn.content for turn in dialogue.prompt] == ["Q", "", "1", "2"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tools": ["search"]}, "line 17: tools must be a list of JSON schemas, each with a name"),
        ({"tools": [{"function": "f"}]}, "line 17: tools must be a list of JSON schemas"),
        ({"messages": [{"role": "function_call", "content": "search()"}]}, "line 17: a tool call"),
        ({"messages": [{"role": "bot", "tool_calls": {"function": "f"}}]}, "line 17: a tool call"),
    ],
)  # fmt: skip
def test_invalid_tools_raise(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(**{"messages": turns(("user", "Q"), GOOD_PAIR), **row})


@pytest.mark.parametrize("key", ["weight", "loss", "train", "training"])
def test_turn_marked_as_untrained_is_not_trained(key: str) -> None:
    ask, answer, *rest = turns(("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4"))
    example = read(messages=[ask, {**answer, key: False}, rest[0], {**rest[1], key: True}])

    assert example is not None
    assert [turn.trained for turn in example.prompt] == [True, False, True]
    assert example.chosen[0].trained
    assert getattr(read(messages=[ask, {**answer, key: 0}]), "chosen", None) == ()
    with pytest.raises(DataError, match=f"line 17: messages has a turn with {key} 'no'"):
        read(messages=[ask, {**answer, key: "no"}])


@pytest.mark.parametrize(
    "turn",
    [
        {"reasoning_content": "why", "content": "good"},
        {"thinking": "why", "content": "good"},
        {"reasoning": "why", "content": "good", "thinking": None},
        {"content": [{"type": "thinking", "thinking": "why"}, {"type": "text", "text": "good"}]},
        {"content": [{"type": "reasoning", "text": "why"}, {"type": "text", "text": "good"}]},
    ],
)
def test_reasoning_of_a_turn_is_read(turn: dict[str, Any]) -> None:
    example = read(messages=[*turns(("user", "Q")), {"role": "assistant", **turn}])

    assert example is not None
    assert example.chosen == (Message("assistant", "good", reasoning="why"),)


def test_unused_keys_of_turns_are_reported_like_columns() -> None:
    stats = ReadStats()
    user_turn = {"role": "user", "content": "Q", "strain": 3, "thinking": None, "reasoning": "no"}
    row = {"messages": [user_turn, {**turns(GOOD_PAIR)[0], "loss": True}], "t": "x"}

    assert read_row(Row(row, ""), {}, stats) == Example((QUESTION,), (GOOD,))
    assert stats.columns - stats.used == {*("messages[].strain", "messages[].reasoning", "t")}


@pytest.mark.parametrize(
    "text",
    [
        "[{'role': 'user', 'content': 'Q'}\n {'role': 'assistant', 'content': 'good'}]",
        "[{'role': 'user', 'content': 'Q",
        '[{"role": "user", "content": array([1])}]',
        "array([{'role': 'user', 'content': 'Q'}], dtype=object)",
    ],
)
def test_unparsable_string_of_turns_raises(text: str) -> None:
    for name in ("prompt", "messages"):
        with pytest.raises(DataError, match=f"line 17: {name} is a string of turns"):
            read(**{name: text, "response": "good"})


@pytest.mark.parametrize("text", ["[{x}]", "[1, 2]", '{"from": "Rome", "to": "Bari"}', "{'a': 1}"])
def test_other_text_in_brackets_is_plain_text(text: str) -> None:
    example = read(prompt=text, response=text)

    assert example is not None
    assert (example.prompt[0].content, example.chosen[0].content) == (text, text)


def test_response_continues_the_assistant_turn_of_the_prompt() -> None:
    stats = ReadStats()
    prompt = turns(("user", "Q"), ("assistant", "The"))
    row = {"prompt": prompt, "response": " answer "}

    assert read_row(Row(row, "rows.jsonl line 17"), {}, stats) == Example(
        (QUESTION, Message("assistant", "The", trained=False)),
        (Message("assistant", " answer"),),
        origin="rows.jsonl line 17",
    )
    assert read(prompt=turns(("user", "Q"), ("assistant", " "))) == read(prompt="Q")
    assistant_first = {"messages": turns(("assistant", "Hi!"), ("user", "Q"), GOOD_PAIR)}
    read_row(Row(assistant_first, "rows.jsonl line 18"), {}, stats)
    assert [*stats.remarks.values()] == [["rows.jsonl line 17"], ["rows.jsonl line 18"]]


def test_unpaired_surrogate_in_a_json_string_raises() -> None:
    surrogate = '[{"name": "\\ud83d", "role": "user", "content": "\\ud83d"}]'
    call = {"messages": [{"role": "tool_call", "content": surrogate}]}
    for row in ({"prompt": surrogate}, {"prompt": "Q", "tools": surrogate}, call):
        with pytest.raises(DataError, match=r"line 17 has .*an unpaired surrogate"):
            read(**row)


def test_margin_beyond_the_float_range_raises() -> None:
    with pytest.raises(DataError, match="line 17: margin must be a finite number"):
        read(prompt="Q", chosen="a", rejected="b", margin=10**400)


RATING: dict[str, Any] = {
    "schema": 1,
    "id": "1",
    "kind": "pair",
    "messages": turns(("user", "Q")),
    "answers": [{"text": "good"}, {"text": "bad"}],
    "choice": 0,
}


def test_rating_with_an_id_of_any_type_can_be_replaced() -> None:
    ids = (([1], None), (0, [1]), (2, 0))
    rows = [Row({**RATING, "id": id_, "supersedes": other}, "r") for id_, other in ids]

    assert drop_revoked(rows) == rows[2:]


DIALOGUES = turns(("user", "Q"), ("assistant", "a")), turns(("user", "Q"), ("assistant", "b"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"colour": "red"}, "no known row format has the columns colour"),
        ({"data": [{"prompt": "Q"}]}, "but its data is a list of rows; save that list"),
        ({"prompt": {"0": "Q"}}, "must be text, got dict; save the rows as JSON lines, in pandas"),
        ({"chosen": "a", "rejected": "b"}, "chosen and rejected must be full dialogues"),
        ({"prompt": "Q", "steps": ["a"], "labels": [1, 0]}, "lists of the same length"),
        ({"prompt": "Q", "steps": [1], "labels": [1]}, "must be strings"),
        ({"prompt": "Q", "steps": ["a"], "labels": [1.1]}, "got 1.1"),
        ({"prompt": "Q", "steps": ["a"], "labels": [-0.1]}, "got -0.1"),
        ({"prompt": "Q", "steps": ["a"], "labels": [float("nan")]}, "got nan"),
        ({"prompt": "Q", "response": "a", "label": 1}, "label is 1; in a row with a response,"),
        ({"instruction": "Q", "output": "a", "history": ["b"]}, "history must be a list of pairs"),
        ({"prompt": ["Q", "R"]}, "prompt is a list of texts; write one row for each of them"),
        ({"prompt": "Q", "response": "a", "label": 0.0}, "label is 0.0; in a row with a response"),
        ({"prompt": "Q", "response": "a", "label": "bad"}, "label is bad; in a row with a"),
        ({"prompt": "Q", "response": "a", "kto_tag": "no"}, "kto_tag is no; in a row with a"),
        ({"messages": [{"role": "king", "content": "a"}]}, "a turn in messages must be"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 2}]}, "weight 2"),
        ({"messages": [{"role": "assistant", "content": "a", "mask": 1}]}, "with the key mask"),
        ({**RATING, "schema": 9}, "rating has schema 9"),
        ({**RATING, "answers": ["good"]}, 'objects, each with a "text" field'),
        ({**RATING, "answers": [{"text": 3}]}, 'objects, each with a "text" field'),
        ({**RATING, "choice": 2}, "kind 'pair' can't have choice 2 and 2 answers"),
    ],
)
def test_invalid_row_raises_with_its_line(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"line 17.*{message}"):
        read(**row)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": turns(("system", "S"), ("assistant", "a"))}, "no assistant"),
        ({"prompt": turns(("user", "Q"), ("system", "S")), "response": "a"}, "a system turn"),
        ({"prompt": "Q", "response": turns(("user", "R"), GOOD_PAIR)}, "does not begin and end"),
        ({"chosen": DIALOGUES[0], "rejected": DIALOGUES[1][:1]}, "no assistant"),
        ({"chosen": DIALOGUES[0], "rejected": turns(("user", "R"), GOOD_PAIR)}, "share no prompt"),
        ({"prompt": "Q", "response": " "}, "empty"),
        ({"prompt": "Q", "chosen": "a", "rejected": ""}, "empty"),
        ({"prompt": "Q", "steps": [" "], "labels": [1]}, "empty"),
        ({**RATING, "answers": [{"text": "a"}, {"text": " "}]}, "empty"),
        ({**RATING, "choice": None}, "prefer neither response"),
    ],
)
def test_unusable_row_is_omitted_and_counted(row: dict[str, Any], reason: str) -> None:
    stats = ReadStats()

    assert read_row(Row(row, "rows.jsonl line 17"), {}, stats) is None
    ((actual_reason, count),) = stats.skipped.items()
    assert (reason in actual_reason, count) == (True, 1)


def test_margins_empty_turns_and_numeric_answers_are_read() -> None:
    from_scores = read(prompt="Q", chosen="a", rejected="b", score_chosen=3.5, score_rejected=1.0)
    from_margin = read(prompt="Q", chosen="a", rejected="b", score_chosen=3.5, margin=9.0)
    messages = turns(("user", "Q"), ("assistant", ""), ("user", "R"), ("assistant", "a"))
    empty = read(messages=messages)

    assert from_scores is not None
    assert from_margin is not None
    assert (from_scores.margin, from_margin.margin) == (2.5, 9.0)
    assert empty is not None
    assert [turn.trained for turn in empty.prompt if turn.role == "assistant"] == [False]
    assert read(instruction="R", output="a", history=[["Q", ""]]) == empty  # as in LLaMA-Factory
    assert read(question="Q", answer=7) == read(question="Q", answer="7")


def test_pair_prompt_ends_with_the_last_shared_user_turn() -> None:
    shared = ("user", "Q"), ("assistant", "a")
    pair = read(
        chosen=turns(*shared, ("user", "R"), ("assistant", "good"), ("user", "thanks")),
        rejected=turns(*shared, ("user", "S"), ("assistant", "bad")),
    )

    assert pair is not None
    sides = (pair.prompt, pair.chosen, pair.rejected)
    assert [[turn.content for turn in side] for side in sides] == [
        ["Q"],
        ["a", "R", "good"],
        ["a", "S", "bad"],
    ]
