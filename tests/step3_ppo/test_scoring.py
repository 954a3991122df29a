"""Scores and rewards of truncated responses, and score moments."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from inference.engine.requests import Response
from pipeline.config import FrozenModelConfig
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.system.errors import ModelError
from step3_ppo.models import Models
from step3_ppo.rewards import compute_raw_scores, measure_scores, reported_scores, score_to_reward
from step3_ppo.train import train
from tests.step3_ppo.resumed import run_full_and_resumed
from tests.step3_ppo.toy import END, PROMPTS, save_models, toy_config, toy_models

RAW = torch.tensor([2.5, 4.5, -40.5])
STOPPED = torch.tensor([True, False, False])


@pytest.fixture
def models(toy: Path) -> Models:
    """Models with score mean 0.5 and standard deviation 2."""
    return toy_models(toy_config(toy))


def test_truncated_response_scores_at_most_the_missing_eos_score(models: Models, toy: Path) -> None:
    def scores(**changes: Any) -> list[float]:
        return reported_scores(RAW, STOPPED, models, toy_config(toy, **changes)).tolist()

    def rewards(**changes: Any) -> list[float]:
        return score_to_reward(RAW, STOPPED, models, toy_config(toy, **changes)).tolist()

    assert scores() == [2.5, 0.5 - 2.0, -40.5]
    assert scores(normalize_score=False) == [2.5, -1.0, -40.5]
    assert scores(missing_eos_score=None) == [2.5, 4.5, -40.5]
    assert rewards() == [1.0, -1.0, -5.0]
    assert rewards(normalize_score=False, score_clip=None) == [2.5, -1.0, -40.5]
    assert rewards(missing_eos_score=None) == [1.0, 2.0, -5.0]


def test_score_moments_use_only_stopped_responses(models: Models, toy: Path) -> None:
    config = toy_config(toy)
    ids = [[30 + row, END if row % 2 else 31] for row in range(8)]
    responses = [Response(pair, [-1.0, -1.0], stopped=pair[1] == END) for pair in ids]
    scores = compute_raw_scores(models, PROMPTS, responses, config)[1::2].double()

    mean, std = measure_scores(models, PROMPTS, responses, config)

    assert mean == pytest.approx(scores.mean().item())
    assert std == pytest.approx(scores.std(correction=0).item())


def test_reward_model_whose_scores_overflow_is_named(toy: Path, tmp_path: Path) -> None:
    shutil.copytree(toy / "reward", path := tmp_path / "broken")
    broken = AutoModelForSequenceClassification.from_pretrained(path)
    broken.score.weight.data.sign_().mul_(3e38)  # finite, but scores overflow
    broken.save_pretrained(path)
    config = toy_config(toy, reward=FrozenModelConfig(path=str(path)), output_dir=tmp_path / "out")
    data = replace(config.data, max_eval_rows=4)

    with pytest.raises(ModelError, match=f"^{path}: the objective is (nan|-?inf) before"):
        train(replace(config, data=data, max_prompt_length=40))


@pytest.mark.jobs
def test_moments_of_the_first_rollout_survive_a_resume(tmp_path: Path) -> None:
    save_models(tmp_path)
    config = toy_config(tmp_path, max_steps=2, save_every=1, max_prompt_length=40)
    config = replace(config, data=replace(config.data, max_eval_rows=4))

    first, second = run_full_and_resumed(config, tmp_path)

    for metric in ("reward_score", "value"):
        values = [line[metric] for line in first if metric in line]
        assert values == [line[metric] for line in second if metric in line]
    once = Checkpoint.open(tmp_path / "full" / "checkpoints" / "step_00000002").state["once"]
    (mean, std), (slope, intercept) = once["moments"], once["values"]
    assert std > 0
    assert slope not in (0, 1)
    assert math.isfinite(mean + intercept)
