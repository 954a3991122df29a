"""The step that uses labels and the others split labeled rows in the same way."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import DataConfig, RowColumns
from pipeline.data.sharing.steps import load_examples

LABELED = {
    "classes": ("kind", "rude", "wrong"),
    "true and false": (True, False),
    "0 and 1": (0, 1),
    "numbers": (0.5, 2, 7),
}


def load_prompts(path: Path, labels: tuple[Any, ...]) -> dict[int, set[str]]:
    """Return the training prompts of each step; a fifth of the rows are pairs."""
    rows = [
        {"prompt": f"q {n}", "response": f"a {n}", "label": labels[n % len(labels)]}
        if n % 5
        else {"prompt": f"q {n}", "chosen": "good", "rejected": "bad"}
        for n in range(300)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(path=(str(path),), labels=True)
    return {
        step: {
            example.prompt[-1].content
            for example in load_examples(
                config, step=step, seed=0, kept=RowColumns(labels=step == 2)
            ).train
        }
        for step in (1, 2, 3)
    }


@pytest.mark.parametrize("labels", LABELED.values(), ids=LABELED)
def test_labeled_prompts_are_used_by_one_step_only(labels: tuple[Any, ...], tmp_path: Path) -> None:
    first, second, third = load_prompts(tmp_path / "a.jsonl", labels).values()

    assert min(map(len, (first, second, third))) > 20
    assert not first & second
    assert not (first | second) & third
