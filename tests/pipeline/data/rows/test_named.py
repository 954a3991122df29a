"""One or two rows of each named data set, with the columns that are read."""

from typing import Any

import pytest

from pipeline.data.examples import Example
from pipeline.data.rows.named import NAMED, named_set
from pipeline.data.rows.sources import Row


def read(name: str, row: dict[str, Any]) -> Example | None:
    data_set = named_set(name)
    assert data_set is not None
    return data_set.read(Row(row, "row 1"))


def texts(example: Example | None) -> tuple[list[str], list[str], list[str]]:
    assert example is not None
    assert example.origin == "row 1"
    assert example.prompt[-1].role == "user"
    return tuple(
        [message.content for message in turns]
        for turns in (example.prompt, example.chosen, example.rejected)
    )


WEBGPT = {
    "question": {"full_text": "Why is the sky blue?"},
    "answer_0": "Because of waves [1], scattered [2, 3] (by far).",
    "score_0": 0.5,
    "answer_1": "It mirrors.[1]",
    "score_1": -0.5,
}
SHP = {
    "history": "In an interview ...",
    "human_ref_A": "I know it's bad ...",
    "human_ref_B": "Currently wrapping up ...",
    "labels": 1,
}
MIRACL = {
    "query": "时间是什么?",
    "positive_passages": [{"docid": "1#0", "title": "时间", "text": "时间是一种尺度。"}],
    "negative_passages": [{"text": "无关。"}, {"text": "也无关。"}],
}
MKQA = {
    "queries": {"zh_cn": "谁唱的?", "ja": "誰が歌ってる?", "en": "who sings"},
    "answers": {
        "zh_cn": [{"type": 1, "entity": "Q545186", "text": "戴维·埃德蒙兹", "aliases": []}],
        "ja": [{"type": 1, "entity": "Q545186", "text": "デイヴ・エドモンズ", "aliases": []}],
        "en": [{"type": 1, "entity": "Q545186", "text": "Dave Edmunds", "aliases": []}],
    },
}
HH_PROMPT = "\n\nHuman: Hello?\n\nAssistant: Hi.\n\nHuman: How are you?\n\nAssistant:"
HH = (
    {"prompt": HH_PROMPT, "response": " Fine.", "chosen": " Fine.", "rejected": " Go away."},
    (["Hello?", "Hi.", "How are you?"], ["Fine."], ["Go away."]),
)

ROWS = {
    "Dahoas/rm-static": HH,
    "Dahoas/full-hh-rlhf": HH,
    "Dahoas/synthetic-instruct-gptj-pairwise": (
        {"prompt": "What is an IRA?", "chosen": "A retirement account.", "rejected": "\nA band.\n"},
        (["What is an IRA?"], ["A retirement account."], ["A band."]),
    ),
    "yitingxie/rlhf-reward-datasets": (
        {"prompt": HH_PROMPT[:-10], "chosen": "Assistant: Fine.", "rejected": "Assistant: No."},
        (["Hello?", "Hi.", "How are you?"], ["Fine."], ["No."]),
    ),
    "openai/webgpt_comparisons": (
        WEBGPT,
        (["Why is the sky blue?"], ["Because of waves, scattered (by far)."], ["It mirrors."]),
    ),
    "stanfordnlp/SHP": (
        SHP,
        ([SHP["history"]], ["I know it's bad ..."], ["Currently wrapping up ..."]),
    ),
    "pvduy/sharegpt_alpaca_oa_vicuna_format": (
        {"prompt": "USER: 2 + 2? ASSISTANT: 4. USER: And 3 + 3?\nASSISTANT:", "label": "6."},
        (["2 + 2?", "4.", "And 3 + 3?"], ["6."], []),
    ),
    "wangrui6/Zhihu-KOL": (
        {"INSTRUCTION": "怎么说?", "RESPONSE": "这样说。", "SOURCE": "Zhihu", "METADATA": "{}"},
        (["怎么说?"], ["这样说。"], []),
    ),
    "Cohere/miracl-zh-queries-22-12": (MIRACL, (["时间是什么?"], ["时间是一种尺度。"], ["无关。"])),
    "Cohere/miracl-ja-queries-22-12": (MIRACL, (["时间是什么?"], ["时间是一种尺度。"], ["无关。"])),
    "Hello-SimpleAI/HC3-Chinese": (
        {"question": "为什么?", "human_answers": ["因为。"]},
        (["为什么?"], ["因为。"], []),
    ),
    "mkqa-Chinese": (MKQA, (["谁唱的?"], ["戴维·埃德蒙兹"], [])),
    "mkqa-Japanese": (MKQA, (["誰が歌ってる?"], ["デイヴ・エドモンズ"], [])),
    "lmqg/qg_jaquad": (
        {"question": "最古の陶器は?", "sentence": "最古は瀬戸焼である。"},
        (["最古の陶器は?"], ["最古は瀬戸焼である。"], []),
    ),
    "lmqg/qag_jaquad": (
        {"questions": ["最古の陶器は?", "何?"], "paragraph": "最古は瀬戸焼である。"},
        (["最古の陶器は?"], ["最古は瀬戸焼である。"], []),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_row_in_the_real_schema_is_read(name: str) -> None:
    row, expected = ROWS[name]

    example = read(name, row)

    assert texts(example) == expected
    assert NAMED[name].has_rejected == bool(expected[2])


def test_scores_or_labels_select_the_chosen_answer() -> None:
    swapped = {**WEBGPT, "score_0": -0.5, "score_1": 1.0}
    for name, row, reversed_row in (
        ("stanfordnlp/SHP", SHP, {**SHP, "labels": 0}),
        ("openai/webgpt_comparisons", WEBGPT, swapped),
    ):
        prompt, chosen, rejected = texts(read(name, row))
        assert texts(read(name, reversed_row)) == (prompt, rejected, chosen)
    example = read("openai/webgpt_comparisons", swapped)
    assert example is not None
    assert example.margin == 1.5
    for name, row in (
        ("openai/webgpt_comparisons", {**WEBGPT, "score_1": 0.5}),
        ("Cohere/miracl-ja", {**MIRACL, "negative_passages": []}),
    ):
        assert read(name, row) is None


def test_all_sixteen_named_sets_are_tested() -> None:
    assert set(NAMED) - set(ROWS) == {"Cohere/miracl-ja"}  # DeepSpeed-Chat's short name
    assert len({*ROWS, "local/jsonfile"}) == 16
