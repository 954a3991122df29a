"""Rows with labels are shared out alike by a step that learns them and by the others."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import DataConfig, RowColumns
from pipeline.data.sharing.steps import load_examples
from pipeline.plan.make import make_plan
from tests.pipeline.stages import THREE_STEPS

LABELLED = {
    "classes": ("kind", "rude", "wrong"),
    "true and false": (True, False),
    "0 and 1": (0, 1),
    "numbers": (0.5, 2, 7),
}


def prompts_of_steps(path: Path, labels: tuple[Any, ...], *, known: bool) -> dict[int, set[str]]:
    """What each step trains on; a fifth of the rows are pairs."""
    rows = [
        {"prompt": f"q {n}", "response": f"a {n}", "label": labels[n % len(labels)]}
        if n % 5
        else {"prompt": f"q {n}", "chosen": "good", "rejected": "bad"}
        for n in range(300)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(path=(str(path),), labels=known)
    return {
        step: {
            each.prompt[-1].content
            for each in load_examples(
                config, step=step, seed=0, kept=RowColumns(labels=step == 2)
            ).train
        }
        for step in (1, 2, 3)
    }


@pytest.mark.parametrize("labels", LABELLED.values(), ids=LABELLED)
def test_no_prompt_of_a_labelled_row_is_in_two_steps(
    labels: tuple[Any, ...], tmp_path: Path
) -> None:
    first, second, third = prompts_of_steps(tmp_path / "a.jsonl", labels, known=True).values()

    assert min(map(len, (first, second, third))) > 20
    assert not first & second
    assert not (first | second) & third


def test_train_py_tells_all_steps_that_step_2_learns_labels(tmp_path: Path) -> None:
    prompts_of_steps(tmp_path / "a.jsonl", LABELLED["classes"], known=True)
    options = ["--data-path", str(tmp_path / "a.jsonl"), "--output-dir", str(tmp_path / "out")]
    plan = make_plan(options, THREE_STEPS)

    assert {name: each.data.labels for name, each in plan.configs.items()} == dict.fromkeys(
        ("step1_sft", "step2_reward", "step3_ppo"), True
    )
    for others in (["--reward.labels", "pairs"], ["--step", "1"]):
        configs = make_plan([*options, *others], THREE_STEPS).configs.values()
        assert not any(config.data.labels for config in configs)
