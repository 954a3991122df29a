import json
import re
from pathlib import Path

import pytest

from pipeline.data.inspect import main


def write(path: Path, count: int = 10) -> str:
    rows = [
        {"prompt": f"Ask {n}", "chosen": f"Good {n}.", "rejected": f"Bad {n}."}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def inspect(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    main(argv)
    return capsys.readouterr().out


def test_step_1_marks_trained_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "rows.jsonl")

    out = inspect(capsys, "--data-path", path, "--rows", "1", "--data-split", "1,0,0")

    counts = re.search(r"step 1: (\d+) training rows, (\d+) for evaluation", out)
    assert counts is not None
    assert int(counts[1]) + int(counts[2]) == 10
    assert f"{path}: uses the columns chosen, prompt, rejected" in out
    assert re.search(rf" ends with </s> \(\d+\)\n\nrow 1: {re.escape(path)} line ", out)
    assert "\nHuman: Ask " not in out  # the embedded tokenizer begins with <s>
    assert "<s>Human: Ask " in out
    assert out.count("Assistant:[[ Good ") == 1
    assert re.search(r"  chosen   assistant Good \d\.\n", out)
    assert ".</s>]]" in out
    assert "row 2" not in out
    assert re.search(r" are trained on; longer than 512 tokens: 0 of \d+", out)


def test_step_2_shows_the_ends_of_pairs_and_step_3_shows_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("--data-path", write(tmp_path / "rows.jsonl"), "--max-length", "6", "--rows", "2")

    pairs = inspect(capsys, "--step", "2", "--data-split", "0,1,0", *settings)
    prompts = inspect(capsys, "--step", "3", "--data-split", "0,0,1", *settings)

    for name, text in (("chosen", "Good"), ("rejected", "Bad")):
        assert len(re.findall(rf"  {name} as 6 tokens, \d trained, \d+ cut off:", pairs)) == 2
        assert len(re.findall(rf"\[ {text} \d\.</s>]]", pairs)) == 2
    assert pairs.count(" as ") == 4
    assert prompts.count(" as ") == prompts.count("  prompt as 6 tokens, 0 trained, ") == 2
