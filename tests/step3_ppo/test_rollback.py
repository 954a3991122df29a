"""A run that exploits a length reward is detected and rolled back, and ends no worse."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import OptimConfig
from rewards.config import RewardConfig
from step3_ppo.config import PPOConfig
from step3_ppo.guard_settings import GuardConfig
from step3_ppo.train import train
from tests.step3_ppo.toy import toy_config
from tests.test_resume import read_metrics

REWARDS = """
def longer(prompts, completions, **_):
    return [len(text) / 30 for text in completions]


def shorter(prompts, completions, **_):
    return [-len(text) / 30 for text in completions]
"""

MAX_STEPS = 10


def exploit_config(toy: Path, directory: Path, **changes: Any) -> PPOConfig:
    """Return settings that reward long responses, while the gold reward prefers short ones."""
    file = directory / "rewards.py"
    file.write_text(REWARDS)
    longer, shorter = (
        RewardConfig(name=name, kind="function", path=f"{file}:{name}")
        for name in ("longer", "shorter")
    )
    optim = OptimConfig(lr=0.03, eps=1e-5, schedule="constant", warmup_ratio=0.0)
    settings: dict[str, Any] = {
        "method": "grpo",
        "advantage": "grpo",
        "group_size": 8,
        "kl_in": "loss",
        "kl_coef": 1e-3,
        "rollout_size": 64,
        "batch_size": 64,
        "micro_batch_size": 64,
        "max_prompt_length": 40,
        "max_steps": MAX_STEPS,
        "save_every": 1,
        "eval_every": 0,
        "rewards": (longer,),
        "gold": shorter,
        "guards": (GuardConfig(signal="divergence", limit=2.0, window=3, action="rollback"),),
    }
    config = toy_config(toy, output_dir=directory / "out", **{**settings, **changes})
    actor = replace(config.actor, optim=optim)
    return replace(config, actor=actor, data=replace(config.data, max_eval_rows=16))


@pytest.mark.jobs
def test_length_exploit_is_rolled_back_without_loss_of_gold(toy: Path, tmp_path: Path) -> None:
    config = exploit_config(toy, tmp_path)

    train(config)

    events = [line["guard"] for line in read_metrics(config.output_dir) if "guard" in line]
    first = next(event for event in events if event["signal"] == "divergence")
    assert (first["action"], first["to"]) == ("rollback", max(0, first["step"] - 3))
    assert first["step"] <= MAX_STEPS
    result = json.loads((config.output_dir / "result.json").read_text())
    assert result["eval"]["gold_after"] >= result["eval"]["gold_before"]
    logged = [line for line in read_metrics(config.output_dir) if "score" in line]
    steps = [line["step"] for line in logged]
    restart = steps.index(first["to"] + 1, first["step"])
    assert steps[:restart] == list(range(1, first["step"] + 1))
    assert [logged[restart][name] for name in ("lr", "kl_coef")] == [0.015, 2e-3]
