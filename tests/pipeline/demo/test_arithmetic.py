"""The arithmetic data set: its sums, its demonstrations and its held-out rows."""

import json
import re
from pathlib import Path

from pipeline.config import DataConfig, RowColumns
from pipeline.data.sharing.steps import load_examples
from pipeline.demo.arithmetic import HELD_OUT, ArithmeticConfig, main, make_sums


def test_every_two_digit_sum_occurs_once_with_its_answer() -> None:
    rows = make_sums(ArithmeticConfig())
    assert rows == make_sums(ArithmeticConfig()) != make_sums(ArithmeticConfig(seed=1))

    assert len({row["prompt"] for row in rows}) == 8100
    for row in rows:
        first, second = map(int, re.findall(r"\d+", row["prompt"]))
        assert 10 <= min(first, second) <= max(first, second) <= 99
        assert int(row["answer"]) == first + second
        assert str(int(row["response"])) == row["response"]
        assert len(row["response"]) == len(row["answer"])
        assert sum(a != b for a, b in zip(row["response"], row["answer"], strict=True)) <= 1


def test_written_directory_is_a_data_path_with_held_out_rows(tmp_path: Path) -> None:
    out = tmp_path / "sums"

    main(["--out", str(out)])

    config = DataConfig(path=(str(out),), max_eval_rows=HELD_OUT)
    kept = RowColumns(needed=frozenset({"answer"}))
    first, third = (load_examples(config, step=step, seed=0, kept=kept) for step in (1, 3))
    assert len(first.eval) == len(third.eval) == HELD_OUT
    assert len(first.train) + len(third.train) == 8100 - HELD_OUT
    test_rows = [json.loads(line) for line in (out / "test.jsonl").read_text().splitlines()]
    held_out = {example.prompt[0].content for example in third.eval}
    assert held_out == {row["prompt"] for row in test_rows}


def test_correct_demonstrations_can_call_the_calculator() -> None:
    plain = make_sums(ArithmeticConfig())
    rows = make_sums(ArithmeticConfig(calculator=True))

    for row, plain_row in zip(rows, plain, strict=True):
        assert (row["prompt"], row["answer"]) == (plain_row["prompt"], plain_row["answer"])
        if plain_row["response"] != plain_row["answer"]:
            assert row["response"] == plain_row["response"]
            continue
        call, result, answer = row["response"]
        match = re.fullmatch(r"<tool_call>(.*)</tool_call>", call["content"])
        assert match
        tool_call = json.loads(match[1])
        assert tool_call["name"] == "add"
        assert f"{tool_call['arguments']['a']}+{tool_call['arguments']['b']}=" == row["prompt"]
        assert result["content"] == f"<tool_response>{row['answer']}</tool_response>"
        assert answer["content"] == row["answer"]
