"""Sums as data: each once, right where it is said, held out apart."""

import json
import re
from pathlib import Path

from pipeline.config import DataConfig, RowColumns
from pipeline.data.sharing.steps import load_examples
from pipeline.demo.arithmetic import HELD_OUT, ArithmeticConfig, main, sums


def test_every_sum_of_two_digits_is_there_once_with_its_answer() -> None:
    rows = sums(ArithmeticConfig())
    assert rows == sums(ArithmeticConfig()) != sums(ArithmeticConfig(seed=1))

    assert len({row["prompt"] for row in rows}) == 8100
    for row in rows:
        first, second = map(int, re.findall(r"\d+", row["prompt"]))
        assert 10 <= min(first, second) <= max(first, second) <= 99
        assert int(row["answer"]) == first + second
        assert str(int(row["response"])) == row["response"]
        assert len(row["response"]) == len(row["answer"])
        assert sum(a != b for a, b in zip(row["response"], row["answer"], strict=True)) <= 1


def test_the_directory_is_a_data_path_with_its_held_out_rows(tmp_path: Path) -> None:
    out = tmp_path / "sums"

    main(["--out", str(out)])

    config = DataConfig(path=(str(out),), max_eval_rows=HELD_OUT)
    kept = RowColumns(needed=frozenset({"answer"}))
    first, third = (load_examples(config, step=step, seed=0, kept=kept) for step in (1, 3))
    assert len(first.eval) == len(third.eval) == HELD_OUT
    assert len(first.train) + len(third.train) == 8100 - HELD_OUT
    written = [json.loads(line) for line in (out / "test.jsonl").read_text().splitlines()]
    held_out = {example.prompt[0].content for example in third.eval}
    assert held_out == {row["prompt"] for row in written}


def test_right_demonstrations_may_call_the_calculator_and_answer_with_what_it_returned() -> None:
    plain = sums(ArithmeticConfig())
    rows = sums(ArithmeticConfig(calculator=True))

    for row, other in zip(rows, plain, strict=True):
        assert (row["prompt"], row["answer"]) == (other["prompt"], other["answer"])
        if other["response"] != other["answer"]:
            assert row["response"] == other["response"]
            continue
        call, result, answer = row["response"]
        written = re.fullmatch(r"<tool_call>(.*)</tool_call>", call["content"])
        assert written
        made = json.loads(written[1])
        assert made["name"] == "add"
        assert f"{made['arguments']['a']}+{made['arguments']['b']}=" == row["prompt"]
        assert result["content"] == f"<tool_response>{row['answer']}</tool_response>"
        assert answer["content"] == row["answer"]
