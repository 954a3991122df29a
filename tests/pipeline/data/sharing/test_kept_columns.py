"""Columns that a reward needs are kept in `Example.extra` and change nothing else."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config import DataConfig, RowColumns
from pipeline.data.sharing.prompts import fingerprint
from pipeline.data.sharing.steps import load_examples

GSM8K = [
    {
        "question": f"Natalia has {number} clips and buys {number} more. How many has she?",
        "answer": f"She has {number} + {number} = <<{number}+{number}={2 * number}>>{2 * number}"
        f" clips.\n#### {2 * number:,}",
    }
    for number in range(500, 560)
]
"""Rows of the schema of openai/gsm8k."""


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> DataConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(path=(str(path),))


def test_gsm8k_yields_demonstrations_or_prompts_with_answers(tmp_path: Path) -> None:
    config = write(tmp_path / "gsm8k.jsonl", GSM8K)

    demonstrations = load_examples(config, step=1, seed=0)
    prompts = load_examples(config, step=3, seed=0, kept=RowColumns(frozenset({"answer"})))

    answers = {row["question"]: row["answer"] for row in GSM8K}
    for example in (*demonstrations.train, *demonstrations.eval):
        assert example.chosen[0].content == answers[example.prompt[0].content]
        assert example.extra == {}
    assert prompts.train
    for example in (*prompts.train, *prompts.eval):
        assert example.extra == {"answer": answers[example.prompt[0].content]}
    trained = {example.prompt for example in demonstrations.train}
    assert not trained & {example.prompt for example in prompts.train}


def test_kept_columns_change_neither_the_split_nor_fingerprints(tmp_path: Path) -> None:
    config = write(tmp_path / "gsm8k.jsonl", GSM8K)

    plain = load_examples(config, step=3, seed=0)
    kept = load_examples(config, step=3, seed=0, kept=RowColumns(all=True))

    assert kept.train == plain.train
    assert kept.eval == plain.eval
    assert fingerprint(kept.train) == fingerprint(plain.train)
    assert set(kept.train[0].extra) == {"question", "answer"}
