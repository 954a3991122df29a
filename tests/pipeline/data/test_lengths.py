"""What is cut is told before a step trains, and a step that would learn nothing is refused."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import DataConfig, TrainedModelConfig
from pipeline.data import lengths
from pipeline.data.examples import Example, Message
from pipeline.data.lengths import Fit, RowsFit, check_lengths
from pipeline.errors import DataError
from step1_sft.config import SFTConfig
from step1_sft.train import train as train_sft
from step2_reward.config import RewardConfig
from step2_reward.train import train as train_reward
from tests.step3_ppo.toy import save_models


def rows(*sizes: int) -> list[Example]:
    return [Example((Message("user", "Q"),), (Message("assistant", "x" * n),)) for n in sizes]


def fits(limit: int) -> Callable[[Any], list[Fit]]:
    """A row of n letters has n tokens, and what is trained begins at the fourth."""

    def fit(examples: Any) -> list[Fit]:
        tokens = [len(example.chosen[0].content) for example in examples]
        return [Fit(n > limit, max(0, min(n, limit) - 3)) for n in tokens]

    return fit


def said(examples: list[Example], limit: int, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    caplog.set_level("INFO", logger="pipeline.data.lengths")
    data = DataConfig(path=("rows.jsonl",), max_length=limit)
    how = RowsFit(fits(limit), end="end", empty="have nothing left to train on")
    check_lengths(examples, how, data, name="training rows")
    return caplog.messages[-1]


def test_cut_and_emptied_rows_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    assert said(rows(2, 5, 8, 11), 7, caplog) == (
        "2 of 4 training rows are longer than 7 tokens and lose their end;"
        " 1 of them have nothing left to train on"
    )


def test_nothing_to_train_on_is_refused(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lengths, "LOOKED_AT", 2)

    with pytest.raises(DataError, match="all 4 training rows have nothing left to train on at"):
        said(rows(1, 2, 3, 9), 3, caplog)


@pytest.mark.parametrize("step", [1, 2])
def test_a_step_that_would_learn_nothing_does_not_begin(step: int, tmp_path: Path) -> None:
    save_models(tmp_path)
    path = tmp_path / "rows.jsonl"
    question = "What is the capital of the country? " * 3
    row = {"chosen": "Yes.", "rejected": "No, yes."}
    path.write_text(
        "".join(json.dumps({"prompt": f"{question}{n}", **row}) + "\n" for n in range(60))
    )
    common: dict[str, Any] = {
        "output_dir": tmp_path / "out",
        "model": TrainedModelConfig(path=str(tmp_path / "actor")),
        "data": DataConfig(path=(str(path),), max_length=2 if step == 2 else 8),
        "max_steps": 1,
    }

    run = partial(train_sft, SFTConfig(**common))
    run = run if step == 1 else partial(train_reward, RewardConfig(**common))
    with pytest.raises(DataError) as raised:
        run()

    things = "rows have nothing left to train on" if step == 1 else "pairs have equal responses"
    assert f" training {things} at data.max_length " in str(raised.value)
    assert (tmp_path / "out" / "metrics.jsonl").read_bytes() == b""
    assert not (tmp_path / "out" / "trained_prompts.hashes").exists()
