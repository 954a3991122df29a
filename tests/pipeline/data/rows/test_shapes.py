import json
from typing import Any

import pytest

from pipeline.data.examples import Example, Message
from pipeline.data.rows.shapes import Reading, read_row
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


SAME_PREFERENCE = {
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
    "hh-rlhf beside its prompt": {
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

SAME_DEMONSTRATION = {
    "messages": {"messages": turns(("user", "Q"), ("assistant", "good"))},
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "good"}]
    },
    "ShareGPT cut from a longer chat": {
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
    "with capitals": {"messages": turns(("User", "Q"), ("Assistant", "good"))},
    "begun by the assistant": {
        "messages": turns(("assistant", "Hi!"), ("user", "Q"), ("assistant", "good"))
    },
    "turns as Python prints them": {
        "prompt": "[{'role': 'user', 'content': 'Q'}]",
        "response": "{'role': 'assistant', 'content': 'good'}",
    },
    "turns as a printed tuple": {
        "messages": str(tuple(turns(("user", "Q"), ("assistant", "good"))))
    },
    "turns as indented JSON": {
        "messages": json.dumps(turns(("user", "Q"), ("assistant", "good")), indent=2)
    },
    "text in parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Q"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "good"}]},
        ]
    },
}


@pytest.mark.parametrize("name", SAME_PREFERENCE)
def test_every_form_of_preference_reads_the_same(name: str) -> None:
    assert read(**SAME_PREFERENCE[name]) == Example(
        (QUESTION,), (GOOD,), (BAD,), origin="rows.jsonl line 17"
    )


@pytest.mark.parametrize("name", SAME_DEMONSTRATION)
def test_every_form_of_demonstration_reads_the_same(name: str) -> None:
    assert read(**SAME_DEMONSTRATION[name]) == Example(
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
def test_every_form_of_prompt_reads_the_same(columns: dict[str, Any]) -> None:
    assert read(**columns) == Example((QUESTION,), origin="rows.jsonl line 17")


@pytest.mark.parametrize(
    "columns",
    [
        {"messages": turns(("system", "S"), ("user", "Q"), ("assistant", "good"))},
        {**SAME_DEMONSTRATION["ShareGPT"], "system": "S"},
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
def test_the_system_message_comes_first(columns: dict[str, Any]) -> None:
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
def test_a_dialogue_as_text_may_have_several_turns(text: str) -> None:
    example = read(prompt=text, response="good")

    assert example is not None
    assert [turn.content for turn in example.prompt] == ["Q", "a", "R"]
    name = "Is Human: a name?"
    assert read(prompt=f"Human: {name} Assistant:") == read(prompt=name)


def test_a_response_that_is_labelled_bad_is_no_demonstration_but_a_rejected_response() -> None:
    reading = Reading()
    row = {"prompt": "Q", "completion": "bad"}

    def label(**columns: Any) -> Example | None:
        return read_row(Row({**row, **columns}, ""), {}, reading)

    assert label(label=True) == label(label="true") == label() == Example((QUESTION,), (BAD,))
    bad = Example((QUESTION,), rejected=(BAD,))
    assert label(label=False) == label(label="False") == bad
    assert label(label="essay") == Example((QUESTION,), (BAD,))  # the name of a class
    tagged = read(conversations=SAME_DEMONSTRATION["ShareGPT"]["conversations"], kto_tag=False)
    assert tagged == Example((QUESTION,), rejected=(GOOD,), origin="rows.jsonl line 17")
    assert reading.no_demonstrations == {"whose label marks the response as bad": 2}


def test_weight_0_keeps_a_turn_from_being_learned() -> None:
    said = turns(("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4"))
    unlearned = read(
        messages=[said[0], {**said[1], "weight": 0}, said[2], {**said[3], "weight": 1}]
    )
    nothing = read(messages=[said[0], {**said[1], "weight": 0}])

    assert unlearned is not None
    assert nothing is not None
    assert [turn.trained for turn in (*unlearned.prompt, *unlearned.chosen)] == [
        *(True, False, True),
        True,
    ]
    assert nothing.chosen == ()


SCHEMA = {"name": "weather", "parameters": {"type": "object"}}
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
TEXT_CALL = {**CALL, "arguments": '{"city": "Oslo"}'}
WITH_TOOLS = {
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
    "OpenAI, earlier": {
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


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_every_form_of_tool_calls_reads_the_same(name: str) -> None:
    calls = {"tool_calls": [{"type": "function", "function": CALL}]}
    tools = {"tools": [{"type": "function", "function": SCHEMA}]}

    assert read(**WITH_TOOLS[name]) == Example(
        (
            Message("user", "Q", keys=json.dumps(tools)),
            Message("assistant", "", keys=json.dumps(calls)),
            Message("tool", "22"),
        ),
        (GOOD,),
        origin="rows.jsonl line 17",
    )


def test_a_call_of_a_tool_is_a_response_and_calls_one_after_another_are_one_turn() -> None:
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
        ({"messages": [{"role": "function_call", "content": "search()"}]}, "line 17: a tool call"),
    ],
)  # fmt: skip
def test_tools_that_can_not_be_read_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(**{"messages": turns(("user", "Q"), GOOD_PAIR), **row})


@pytest.mark.parametrize("key", ["weight", "loss", "train", "training"])
def test_a_turn_that_its_row_marks_is_not_learned(key: str) -> None:
    said = turns(("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4"))
    example = read(messages=[said[0], {**said[1], key: False}, said[2], {**said[3], key: True}])

    assert example is not None
    assert [turn.trained for turn in example.prompt] == [True, False, True]
    assert example.chosen[0].trained
    with pytest.raises(DataError, match=f"line 17: messages has a turn of {key} 'no'"):
        read(messages=[said[0], {**said[1], key: "no"}])


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
def test_reasoning_in_a_turn_is_read(turn: dict[str, Any]) -> None:
    example = read(messages=[*turns(("user", "Q")), {"role": "assistant", **turn}])

    assert example is not None
    assert example.chosen == (Message("assistant", "good", reasoning="why"),)


def test_keys_of_turns_that_nothing_reads_are_reported_like_columns() -> None:
    reading = Reading()
    said = {"role": "user", "content": "Q", "strain": 3, "thinking": None, "reasoning": "no"}
    row = {"messages": [said, {**turns(GOOD_PAIR)[0], "loss": True}], "t": "x"}

    assert read_row(Row(row, ""), {}, reading) == Example((QUESTION,), (GOOD,))
    assert reading.columns - reading.used == {*("messages[].strain", "messages[].reasoning", "t")}


@pytest.mark.parametrize(
    "text",
    [
        "[{'role': 'user', 'content': 'Q'}\n {'role': 'assistant', 'content': 'good'}]",
        "[{'role': 'user', 'content': 'Q",
        '[{"role": "user", "content": array([1])}]',
        "array([{'role': 'user', 'content': 'Q'}], dtype=object)",
    ],
)
def test_turns_as_text_that_can_not_be_read_are_refused(text: str) -> None:
    for name in ("prompt", "messages"):
        with pytest.raises(DataError, match=f"line 17: {name} has turns as a string"):
            read(**{name: text, "response": "good"})


@pytest.mark.parametrize("text", ["[{x}]", "[1, 2]", '{"from": "Rome", "to": "Bari"}', "{'a': 1}"])
def test_other_text_in_brackets_stays_text(text: str) -> None:
    example = read(prompt=text, response=text)

    assert example is not None
    assert (example.prompt[0].content, example.chosen[0].content) == (text, text)


def test_a_prompt_that_ends_in_an_assistant_turn_is_continued() -> None:
    reading = Reading()
    begun = turns(("user", "Q"), ("assistant", "The"))
    row = {"prompt": begun, "response": " answer "}

    assert read_row(Row(row, "rows.jsonl line 17"), {}, reading) == Example(
        (QUESTION, Message("assistant", "The", trained=False)),
        (Message("assistant", " answer"),),
        origin="rows.jsonl line 17",
    )
    assert list(reading.remarks.values()) == [["rows.jsonl line 17"]]
    assert read(prompt=turns(("user", "Q"), ("assistant", " "))) == read(prompt="Q")


def test_half_an_emoji_in_json_as_text_is_refused() -> None:
    half = '[{"name": "\\ud83d", "role": "user", "content": "\\ud83d"}]'
    call = {"messages": [{"role": "tool_call", "content": half}]}
    for row in ({"prompt": half}, {"prompt": "Q", "tools": half}, call):
        with pytest.raises(DataError, match=r"line 17 has .*an unpaired surrogate"):
            read(**row)


def test_a_number_beyond_every_float_is_refused() -> None:
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
DIALOGUES = turns(("user", "Q"), ("assistant", "a")), turns(("user", "Q"), ("assistant", "b"))


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"colour": "red"}, "no known row format has the columns colour"),
        ({"data": [{"prompt": "Q"}]}, "but data is a list of rows; save only this list"),
        ({"prompt": {"0": "Q"}}, "must be text, got dict; save the rows as JSON lines, in pandas"),
        ({"chosen": "a", "rejected": "b"}, "chosen and rejected must be full dialogues"),
        ({"prompt": "Q", "steps": ["a"], "labels": [1, 0]}, "lists of the same length"),
        ({"prompt": "Q", "steps": [1], "labels": [1]}, "must be strings"),
        ({"prompt": "Q", "steps": ["a"], "labels": [1.1]}, "got 1.1"),
        ({"prompt": "Q", "steps": ["a"], "labels": [-0.1]}, "got -0.1"),
        ({"prompt": "Q", "steps": ["a"], "labels": [float("nan")]}, "got nan"),
        ({"prompt": "Q", "response": "a", "label": 1}, "label is 1; with a response it must be"),
        ({"prompt": "Q", "response": "a", "label": 0.0}, "label is 0.0; with a response it must"),
        ({"messages": [{"role": "king", "content": "a"}]}, "a turn in messages must be"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 2}]}, "weight 2"),
        ({"messages": [{"role": "assistant", "content": "a", "mask": 1}]}, "with the key mask"),
        ({**RATING, "schema": 9}, "rating has schema 9"),
        ({**RATING, "answers": ["good"]}, "a list of objects, each with a text"),
        ({**RATING, "choice": 2}, "kind 'pair' can't have 2 answers and choice 2"),
    ],
)
def test_a_row_that_can_not_be_read_is_named(row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=f"line 17.*{sentence}"):
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
def test_a_row_without_a_response_is_left_out_and_counted(row: dict[str, Any], reason: str) -> None:
    reading = Reading()

    assert read_row(Row(row, "rows.jsonl line 17"), {}, reading) is None
    ((found, count),) = reading.left_out.items()
    assert (reason in found, count) == (True, 1)


def test_margins_and_empty_turns_are_read() -> None:
    scored = read(prompt="Q", chosen="a", rejected="b", score_chosen=3.5, score_rejected=1.0)
    given = read(prompt="Q", chosen="a", rejected="b", score_chosen=3.5, margin=9.0)
    empty = read(
        messages=turns(("user", "Q"), ("assistant", ""), ("user", "R"), ("assistant", "a"))
    )

    assert scored is not None
    assert given is not None
    assert (scored.margin, given.margin) == (2.5, 9.0)
    assert empty is not None
    assert [turn.trained for turn in empty.prompt if turn.role == "assistant"] == [False]


def test_the_prompt_of_two_dialogues_ends_in_the_last_user_turn_that_they_share() -> None:
    begin = ("user", "Q"), ("assistant", "a")
    pair = read(
        chosen=turns(*begin, ("user", "R"), ("assistant", "good"), ("user", "thanks")),
        rejected=turns(*begin, ("user", "S"), ("assistant", "bad")),
    )

    assert pair is not None
    said = [[turn.content for turn in part] for part in (pair.prompt, pair.chosen, pair.rejected)]
    assert said == [["Q"], ["a", "R", "good"], ["a", "S", "bad"]]
