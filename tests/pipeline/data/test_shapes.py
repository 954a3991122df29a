from typing import Any

import pytest

from pipeline.data.examples import Example, Message
from pipeline.data.rows.columns import Reading
from pipeline.data.rows.shapes import read_row
from pipeline.data.rows.sources import Row

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
    "LLaMA-Factory, Alpaca": {
        "instruction": "Q",
        "input": "",
        "chosen": "good",
        "rejected": "bad",
    },
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
    ],
)  # fmt: skip
def test_the_system_message_comes_first(columns: dict[str, Any]) -> None:
    example = read(**columns)

    assert example is not None
    assert (example.prompt, example.chosen) == ((SYSTEM, QUESTION), (GOOD,))


def test_the_last_assistant_turn_is_the_response() -> None:
    example = read(
        messages=turns(("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4"))
    )

    assert example is not None
    assert [message.content for message in example.prompt] == ["1", "2", "3"]
    assert [message.content for message in example.chosen] == ["4"]


def test_dialogues_share_their_prompt_up_to_where_they_part() -> None:
    example = read(
        chosen="\n\nHuman: 1\n\nAssistant: 2\n\nHuman: 3\n\nAssistant: 4",
        rejected="\n\nHuman: 1\n\nAssistant: 2\n\nHuman: other\n\nAssistant: 4",
    )

    assert example is not None
    assert [message.content for message in example.prompt] == ["1"]
    assert [message.content for message in example.chosen] == ["2", "3", "4"]
    assert [message.content for message in example.rejected] == ["2", "other", "4"]


EMPTY = [("user", "A"), ("assistant", "B"), ("user", "C"), ("assistant", "")]
ANSWERED = [*EMPTY[:3], ("assistant", "D")]


@pytest.mark.parametrize(("chosen", "rejected"), [(ANSWERED, EMPTY), (EMPTY, ANSWERED)])
def test_an_empty_response_to_the_last_turn_makes_no_pair_of_the_turn_before(
    chosen: list[tuple[str, str]], rejected: list[tuple[str, str]]
) -> None:
    def text(said: list[tuple[str, str]]) -> str:
        names = {"user": "Human", "assistant": "Assistant"}
        return "".join(f"\n\n{names[role]}: {content}" for role, content in said)

    assert read(chosen=text(chosen), rejected=text(rejected)) is None
    assert read(chosen=text(chosen[:3]), rejected=text(ANSWERED)) is None
    assert read(chosen=turns(*chosen), rejected=turns(*rejected)) is None
    assert read(prompt="Q", chosen="good", rejected=" ") is None
    assert read(prompt="Q", response="\n") is None


def test_an_empty_earlier_turn_is_read_and_not_learned() -> None:
    example = read(messages=turns(("user", "1"), ("assistant", ""), ("user", "3"), GOOD_PAIR))

    assert example is not None
    assert [message.trained for message in example.prompt] == [True, False, True]


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
    assert reading.no_demonstrations == {"whose label says that the response is bad": 2}


def test_weight_0_takes_a_row_out_and_keeps_a_turn_from_being_learned() -> None:
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
    reading = Reading()
    assert read_row(Row({"prompt": "Q", "response": "x", "weight": 0}, ""), {}, reading) is None
    assert reading.left_out == {"of weight 0": 1}
    assert read(prompt="Q", response="good", weight="1.0") is not None


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "tool", "content": "22 degrees"},
        {"from": "observation", "value": "22 degrees"},
        {"from": "function_call", "value": "{}"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    ],
)
def test_rows_with_tool_calls_are_left_out_and_counted(turn: dict[str, Any]) -> None:
    reading = Reading()
    said = [*turns(("user", "Q")), turn, *turns(GOOD_PAIR)]

    assert read_row(Row({"messages": said}, ""), {}, reading) is None
    assert reading.left_out == {"with tool calls, which no step trains on": 1}


def test_the_margin_is_read_or_taken_from_the_scores() -> None:
    row = SAME_PREFERENCE["strings"]
    margins = [
        read(**row),
        read(**row, margin=2),
        read(**row, score_chosen=7.5, score_rejected=5),
        read({"margin": "gap"}, **row, gap=1.5),
        read(**row, margin="0.5"),
    ]

    assert [example.margin for example in margins if example] == [None, 2.0, 2.5, 1.5, 0.5]


def test_fields_say_which_column_is_which() -> None:
    example = read(
        {"prompt": "question", "chosen": "good", "rejected": "bad"},
        question="Q", good="good", bad="bad", text="something else", messages=turns(("user", "no")),
    )  # fmt: skip

    assert example == Example((QUESTION,), (GOOD,), (BAD,), origin="rows.jsonl line 17")
