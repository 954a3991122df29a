"""Trained and skipped parts of rows, and the messages about them."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Example, Message
from pipeline.data.sharing.steps import StepData, load_examples
from pipeline.models.hf.chat import load_chat
from pipeline.system.errors import DataError
from step3_preference.config import PreferenceConfig
from step3_preference.objective import kto_weights
from step3_preference.reference import RowStore
from step3_preference.rows import Row, collate_rows, mismatch_responses, truncate_row
from tests.step3_preference.toy import toy_config, write_rows

USER, CHOSEN, REJECTED = (
    Message("user", "What is two and two, please, my friend?"),
    Message("assistant", "Sure! It is four."),
    Message("assistant", "Go away. Nobody asked me, and I don't know."),
)
PAIR = Example((USER,), (CHOSEN,), (REJECTED,))


def load_setup(toy: Path, max_length: int, **changes: str) -> tuple[ChatFormat, PreferenceConfig]:
    config = toy_config(toy, data={"max_length": max_length}, **changes)
    return load_chat(config.model, config.data), config


def encoded_lengths(toy: Path) -> tuple[int, int, int]:
    chat, _ = load_setup(toy, 200)
    rows = (len(chat.encode((USER,), (response,))) for response in (CHOSEN, REJECTED))
    return len(chat.encode_prompt((USER,))), *rows


def test_uninformative_rows_are_skipped_and_counted(
    toy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, chosen, rejected = encoded_lengths(toy)
    chat, config = load_setup(toy, chosen)
    equal = Example((USER,), (CHOSEN,), (CHOSEN,))
    unlearned = Example((USER,), (Message("assistant", "x", trained=False),), (CHOSEN,))
    long = Example((USER,), (CHOSEN,), (Message("assistant", "no " * 99),))
    store = RowStore(config)

    with caplog.at_level(logging.INFO):
        data = store.select(StepData([PAIR, equal, long, unlearned], [PAIR], []), chat)

    assert data.train == [PAIR]
    assert (len(store), store.num_good) == (1, 1)
    (row,) = store.rows([0])
    assert row == truncate_row(PAIR, chat, config)[0]
    assert rejected > chosen
    assert (
        f"4 training rows at data.max_length {chosen}: truncated the prompt of 1, skipped 3 (1 too"
        " long, 1 with identical responses, 1 with a response without trained tokens)"
    ) in caplog.text


def test_data_without_usable_rows_is_rejected(toy: Path) -> None:
    chat, config = load_setup(toy, 200)
    equal = Example((USER,), (CHOSEN,), (CHOSEN,))
    data = replace(config.data, path=(str(toy / "labeled.jsonl"),))

    with pytest.raises(DataError, match=r"none of the 2 training rows .*2 with identical"):
        RowStore(config).select(StepData([equal, equal], [PAIR], []), chat)
    with pytest.raises(DataError, match="no row has what step 3 needs, a chosen and a rejected"):
        load_examples(data, step=3, seed=0, share=config.row_share)


def test_rows_that_do_not_fit_are_replaced_in_the_evaluation(toy: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "chosen": "no " * 99, "rejected": "a"} for n in range(9)]
    rows.append({"prompt": "Fits?", "chosen": "a", "rejected": "b"})
    for name, lines in (("train", rows), ("held_out", rows[:1] + rows[5:])):
        write_rows(tmp_path / f"{name}.jsonl", lines)
    data = {"path": [f"{tmp_path}/train.jsonl"], "eval_path": [f"{tmp_path}/held_out.jsonl"]}
    for seed in range(3):  # in some orders a row that is too long comes first
        config = toy_config(toy, data={**data, "max_length": 40, "max_eval_rows": 1, "seed": seed})
        examples = load_examples(config.data, step=3, seed=0, share=config.row_share)
        store = RowStore(config)

        kept = store.select(replace(examples, train=[PAIR]), load_chat(config.model, config.data))

        assert [row.prompt[0].content for row in kept.eval] == ["Fits?"]


def test_kto_balances_good_and_bad_over_all_training_rows(toy: Path) -> None:
    chat, config = load_setup(toy, 64, method="kto", weight_chosen="auto", weight_rejected="auto")
    good = [Example((USER,), (Message("assistant", text),)) for text in ("a", "b", "c")]
    bad = Example((USER,), (), (CHOSEN,))
    store = RowStore(config)

    store.select(StepData([*good, bad], [good[0], bad], []), chat)

    assert (store.num_good, len(store)) == (3, 4)
    assert kto_weights(3, 1, config) == (1.0, 3.0)
    assert kto_weights(1, 4, config) == (4.0, 1.0)
    assert kto_weights(1, 4, load_setup(toy, 64, method="kto")[1]) == (1.0, 1.0)


def encode_tokens(prompt: list[int], response: list[int]) -> Encoded:
    return Encoded(prompt + response, [False] * len(prompt) + [True] * len(response))


def test_pair_shares_its_prompt_and_sums_are_per_response_chosen_first() -> None:
    rows = [
        Row(encode_tokens([1, 2], [3]), encode_tokens([1, 2], [4, 5])),
        Row(None, encode_tokens([6], [7, 8, 9])),
        Row(encode_tokens([6, 6], [7]), None),
    ]

    batch = collate_rows(rows, [0, 1, 2])

    assert batch.tokens.lengths == (2, 1, 2, 4, 3)
    assert batch.tokens.continues == (None, 0, 0, None, None)
    assert (batch.chosen, batch.rejected) == ((0, 2), (0, 1))
    assert batch.sums(torch.tensor([1.0, 2, 3, 4, 5, 6, 7])).tolist() == [1, 7, 5, 15]
    assert batch.lengths().tolist() == [1, 1, 2, 3]


def test_mismatched_pairs_use_responses_to_other_prompts() -> None:
    rows = [
        Row(encode_tokens([1], [10, 11]), None),
        Row(None, encode_tokens([1], [12])),
        Row(encode_tokens([2, 3], [13]), None),
    ]

    pairs = mismatch_responses(rows, 64)

    assert [row.input_ids for row in pairs] == [[1, 13], [1, 13], [2, 3, 10, 11]]
    assert pairs[2].trained == [False, False, True, True]
    assert [row.input_ids for row in mismatch_responses(rows, 3)] == [[1, 13], [1, 13], [3, 10, 11]]
    same_prompt = mismatch_responses(rows[:2], 64)
    assert [row.input_ids for row in same_prompt] == [[1, 10, 11], [1, 12]]
