"""Truncation is reported before training, and a step without trainable tokens is refused."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import DataConfig, TrainedModelConfig
from pipeline.system.errors import DataError
from step1_sft.config import SFTConfig
from step1_sft.train import train as train_sft
from step2_reward.config import RewardConfig
from step2_reward.train import train as train_reward
from tests.step3_ppo.toy import save_models


@pytest.mark.parametrize("step", [1, 2])
def test_step_without_trainable_tokens_raises_before_training(step: int, tmp_path: Path) -> None:
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

    reason = "rows have nothing left to train on" if step == 1 else "pairs have identical responses"
    assert f" training {reason} at data.max_length " in str(raised.value)
    assert (tmp_path / "out" / "metrics.jsonl").read_bytes() == b""
    assert not (tmp_path / "out" / "trained_prompts.hashes").exists()
