"""Labels and ties of rows."""

import json
from pathlib import Path
from typing import Any

from pipeline.config import DataConfig, RowColumns, RowShare
from pipeline.data.examples import Example
from pipeline.data.rows.shapes import read_row
from pipeline.data.rows.sources import Row
from pipeline.data.sharing.steps import load_examples

LABELS = RowColumns(labels=True)


def read(*, kept: RowColumns = LABELS, **columns: Any) -> Example:
    example = read_row(Row(columns, "rows.csv line 7"), {}, kept=kept)
    assert example is not None
    return example


def test_label_is_parsed_as_a_class_a_number_or_a_boolean() -> None:
    for value_in_row, expected in (
        ("spam", "spam"),
        (" 3 ", 3),
        ("3.0", 3),
        ("2.5", 2.5),
        ("True", True),
        (False, False),
        (0, 0),
    ):
        label = read(prompt="Q", label=value_in_row).label
        assert (type(label), label) == (type(expected), expected)
    assert read(prompt="Q").label is None
    assert read(text="plain", label="essay").label == "essay"
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "R"}]
    labeled = read(messages=turns, label=0)
    assert (labeled.prompt[0].content, labeled.chosen[0].content) == ("Q", "R")
    assert labeled.label == 0


def test_tie_column_is_read() -> None:
    for value, tie in (("true", True), (1.0, True), ("1.00", True), (0, False), ("0.0", False)):
        assert read(prompt="Q", chosen="x", rejected="y", tie=value).tie == tie


def test_ties_are_not_trained_on(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{n}", "chosen": "x", "rejected": "y", "tie": n % 2 == 0} for n in range(120)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(path=(str(file),), split=(0, 1, 0))

    singles = RowShare("responses", (2,))  # of kto
    for step, kept, share in ((2, None, None), (2, LABELS, None), (3, None, singles)):
        data = load_examples(config, step=step, seed=0, kept=kept, share=share)
        assert not any(row.tie for row in (*data.train, *data.eval))
        assert any(", or with a tie, left to other steps" in note for note in data.notes)
