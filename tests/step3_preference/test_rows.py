"""Trained and skipped parts of rows, and the messages about them."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Example, Message
from pipeline.data.sharing.steps import StageData, load_examples
from pipeline.models.hf.chat import load_chat
from pipeline.system.errors import DataError
from step3_preference.config import PreferenceConfig
from step3_preference.objective import kto_weights
from step3_preference.reference import RowStore
from step3_preference.rows import Row, collate_rows, fit, mismatched
from tests.step3_preference.toy import toy_config, write_rows

USER, SURE, NO = (
    Message("user", "What is two and two, please, my friend?"),
    Message("assistant", "Sure! It is four."),
    Message("assistant", "Go away. Nobody asked me, and I don't know."),
)
PAIR = Example((USER,), (SURE,), (NO,))


def opened(toy: Path, max_length: int, **changes: str) -> tuple[ChatFormat, PreferenceConfig]:
    config = toy_config(toy, data={"max_length": max_length}, **changes)
    return load_chat(config.model, config.data), config


def lengths(toy: Path) -> tuple[int, int, int]:
    chat, _ = opened(toy, 200)
    whole = (len(chat.encode((USER,), (each,))) for each in (SURE, NO))
    return len(chat.encode_prompt((USER,))), *whole


def test_rows_that_teach_nothing_are_left_out_and_counted(
    toy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, chosen, rejected = lengths(toy)
    chat, config = opened(toy, chosen)
    equal = Example((USER,), (SURE,), (SURE,))
    unlearned = Example((USER,), (Message("assistant", "x", trained=False),), (SURE,))
    long = Example((USER,), (SURE,), (Message("assistant", "no " * 99),))
    store = RowStore(config)

    with caplog.at_level(logging.INFO):
        data = store.sift(StageData([PAIR, equal, long, unlearned], [PAIR], []), chat)

    assert data.train == [PAIR]
    assert (len(store), store.num_good) == (1, 1)
    (row,) = store.rows([0])
    assert row == fit(PAIR, chat, config)[0]
    assert rejected > chosen
    assert (
        f"of 4 training rows at data.max_length {chosen}, 1 lose the start of their prompt; 1 don't"
        " fit, 1 have equal responses, 1 have a response without trained tokens and are skipped"
    ) in caplog.text


def test_rows_of_which_none_can_be_learned_from_are_refused(toy: Path) -> None:
    chat, config = opened(toy, 200)
    equal = Example((USER,), (SURE,), (SURE,))
    data = replace(config.data, path=(str(toy / "labelled.jsonl"),))

    with pytest.raises(DataError, match=r"none of the 2 training rows .*2 have equal responses"):
        RowStore(config).sift(StageData([equal, equal], [PAIR], []), chat)
    with pytest.raises(DataError, match="no row has what step 3 needs, a chosen and a rejected"):
        load_examples(data, step=3, seed=0, share=config.row_share)


def test_rows_that_do_not_fit_take_no_place_in_the_evaluation(toy: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "chosen": "no " * 99, "rejected": "a"} for n in range(9)]
    rows.append({"prompt": "Fits?", "chosen": "a", "rejected": "b"})
    for name, part in (("train", rows), ("held_out", rows[:1] + rows[5:])):
        write_rows(tmp_path / f"{name}.jsonl", part)
    data = {"path": [f"{tmp_path}/train.jsonl"], "eval_path": [f"{tmp_path}/held_out.jsonl"]}
    for seed in range(3):  # of several orders one has a row that is too long first
        config = toy_config(toy, data={**data, "max_length": 40, "max_eval_rows": 1, "seed": seed})
        found = load_examples(config.data, step=3, seed=0, share=config.row_share)
        store = RowStore(config)

        kept = store.sift(replace(found, train=[PAIR]), load_chat(config.model, config.data))

        assert [row.prompt[0].content for row in kept.eval] == ["Fits?"]


def test_kto_balances_its_kinds_over_all_training_rows(toy: Path) -> None:
    chat, config = opened(toy, 64, method="kto", weight_chosen="auto", weight_rejected="auto")
    good = [Example((USER,), (Message("assistant", text),)) for text in ("a", "b", "c")]
    bad = Example((USER,), (), (SURE,))
    store = RowStore(config)

    store.sift(StageData([*good, bad], [good[0], bad], []), chat)

    assert (store.num_good, len(store)) == (3, 4)
    assert kto_weights(3, 1, config) == (1.0, 3.0)
    assert kto_weights(1, 4, config) == (4.0, 1.0)
    assert kto_weights(1, 4, opened(toy, 64, method="kto")[1]) == (1.0, 1.0)


def side(prompt: list[int], response: list[int]) -> Encoded:
    return Encoded(prompt + response, [False] * len(prompt) + [True] * len(response))


def test_a_batch_has_the_chosen_sequences_first_and_sums_the_tokens_of_each_response() -> None:
    rows = [
        Row(side([1, 2], [3]), side([1, 2], [4, 5])),
        Row(None, side([6], [7, 8, 9])),
        Row(side([6, 6], [7]), None),
    ]

    batch = collate_rows(rows, [0, 1, 2])

    assert batch.tokens.lengths == (3, 3, 4, 4)
    assert (batch.chosen, batch.rejected) == ((0, 2), (0, 1))
    assert batch.sums(torch.tensor([1.0, 2, 3, 4, 5, 6, 7])).tolist() == [1, 2, 7, 18]
    assert batch.lengths().tolist() == [1, 1, 2, 3]


def test_each_prompt_gets_the_response_of_the_next_row_that_has_another_prompt() -> None:
    rows = [
        Row(side([1], [10, 11]), None),
        Row(None, side([1], [12])),
        Row(side([2, 3], [13]), None),
    ]

    found = mismatched(rows, 64)

    assert [each.input_ids for each in found] == [[1, 13], [1, 13], [2, 3, 10, 11]]
    assert found[2].trained == [False, False, True, True]
    assert [each.input_ids for each in mismatched(rows, 3)] == [[1, 13], [1, 13], [3, 10, 11]]
    alone = mismatched(rows[:2], 64)
    assert [each.input_ids for each in alone] == [[1, 10, 11], [1, 12]]
