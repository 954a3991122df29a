from typing import Any

import pytest

from pipeline.data.dialogues import parse_dialogue
from pipeline.data.examples import Example, Message
from pipeline.data.shapes import check_fields, read_row
from pipeline.data.sources import Row
from pipeline.errors import DataError

QUESTION, GOOD, BAD = (
    Message("user", "Q"),
    Message("assistant", "good"),
    Message("assistant", "bad"),
)
SYSTEM = Message("system", "S")


def read(fields: dict[str, str] | None = None, /, **columns: Any) -> Example | None:
    return read_row(Row(columns, "rows.jsonl line 17"), fields or {})


def refused(fields: dict[str, str] | None = None, /, **columns: Any) -> str:
    with pytest.raises(DataError) as raised:
        read(fields, **columns)
    return str(raised.value)


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


def test_text_answers_nobody() -> None:
    example = read(text=" Once upon a time.\n")

    assert example is not None
    assert (example.prompt, example.chosen) == (
        (),
        (Message("assistant", " Once upon a time.\n"),),
    )


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


def test_alpacas_input_follows_its_instruction() -> None:
    example = read(instruction="Add.", input="1 + 1", output="2")

    assert example is not None
    assert example.prompt == (Message("user", "Add.\n\n1 + 1"),)


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


def test_turns_of_one_role_are_joined() -> None:
    assert parse_dialogue("\n\nHuman: 1\n\nHuman: 2\n\nAssistant: 3") == (
        Message("user", "1\n\n2"),
        Message("assistant", "3"),
    )


@pytest.mark.parametrize("text", ["What does Human: mean?", "Assistant: no", "", "plain"])
def test_other_text_is_not_a_dialogue(text: str) -> None:
    assert parse_dialogue(text) is None


@pytest.mark.parametrize(
    "columns",
    [
        {"messages": []},
        {"messages": turns(("assistant", "hello"), ("assistant", "again"))},
        {"chosen": "\n\nHuman: Q\n\nAssistant:", "rejected": "\n\nHuman: Q\n\nAssistant: bad"},
        {"chosen": "\n\nHuman: Q\n\nAssistant: a", "rejected": "\n\nHuman: R\n\nAssistant: a"},
        {"text": "  "},
    ],
)
def test_rows_without_an_answered_user_turn_hold_nothing(columns: dict[str, Any]) -> None:
    assert read(**columns) is None


def test_the_margin_is_read_or_taken_from_the_scores() -> None:
    row = SAME_PREFERENCE["strings"]
    margins = [
        read(**row),
        read(**row, margin=2),
        read(**row, score_chosen=7.5, score_rejected=5),
        read({"margin": "gap"}, **row, gap=1.5),
    ]

    assert [example.margin for example in margins if example] == [None, 2.0, 2.5, 1.5]


def test_fields_say_which_column_is_which() -> None:
    example = read(
        {"prompt": "question", "chosen": "good", "rejected": "bad"},
        question="Q", good="good", bad="bad", text="something else", messages=turns(("user", "no")),
    )  # fmt: skip

    assert example == Example((QUESTION,), (GOOD,), (BAD,), origin="rows.jsonl line 17")


def test_fields_choose_among_the_shapes_a_row_has() -> None:
    example = read({"text": "body"}, body="B", prompt="Q", response="good")

    assert example is not None
    assert example.chosen == (Message("assistant", "B"),)


def test_wrong_fields_are_named() -> None:
    with pytest.raises(DataError, match="fields: promt is not a name we know; use one of answer, "):
        check_fields({"promt": "question"}, ["question"])
    with pytest.raises(DataError, match=r"no row has the column q \(for prompt\); there are a, b"):
        check_fields({"prompt": "q"}, ["a", "b"])


def test_a_row_without_a_known_shape_says_what_it_has_and_what_is_needed() -> None:
    message = refused(query="Q", reply="good")

    assert message.startswith(
        "rows.jsonl line 17: no known shape of row has the columns query, reply"
    )
    assert "prompt + chosen + rejected" in message
    assert "--fields" in message


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"prompt": 5, "response": "x"}, "prompt must be text, got int"),
        ({"prompt": "Q", "response": {"a": 1}}, "response must be text, got dict"),
        ({"messages": "Q"}, "messages must be a list of turns, got str"),
        ({"messages": ["Q"]}, 'a turn in messages must be {"role": ..., "content": ...}'),
        ({"messages": turns(("tool", "x"))}, "messages has a turn of role 'tool'; roles are"),
        ({"chosen": "good", "rejected": "bad"}, "without a prompt, chosen and rejected must be"),
        ({**SAME_PREFERENCE["strings"], "margin": "big"}, "margin must be a finite number"),
    ],
)
def test_a_column_of_the_wrong_kind_is_named(columns: dict[str, Any], sentence: str) -> None:
    message = refused(**columns)

    assert message.startswith("rows.jsonl line 17: ")
    assert sentence in message
