"""Step 3 with programs that reward responses, in place of a reward model and beside it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation.held_out import Prompt
from inference.generation import Response
from pipeline.data.examples import Message
from rewards.config import RewardConfig
from rewards.workers import RewardError
from step3_ppo.config import PPOConfig
from step3_ppo.reward_sources import RewardSources, Submitting
from step3_ppo.rewards import ResponseRewards, compute_reward, compute_rewards
from step3_ppo.train import train
from tests.step3_ppo.toy import END, PROMPTS, toy_config, toy_models

FUNCTIONS = """
from pathlib import Path

def length(episodes):
    return [each.num_tokens / 8 for each in episodes]

def wanted(episodes):
    return [each.extra["wanted"] for each in episodes]

def first_words(episodes):
    return [float(each.response[:1].isalpha()) for each in episodes]

def raises(episodes):
    raise ValueError("no such answer")

def hangs(episodes):
    import time
    time.sleep(60)

def one_less(episodes):
    return [1.0 for each in episodes[1:]]

def not_a_number(episodes):
    return [float("nan") for each in episodes]

def word(episodes):
    return ["good" for each in episodes]

def nothing(episodes):
    return [None for each in episodes]

def breaks_later(episodes):
    here = Path(__file__).parent
    calls = here / "calls"
    calls.write_text(calls.read_text() + "." if calls.exists() else ".")
    if len(calls.read_text()) > 4 and not (here / "mended").exists():
        raise RuntimeError("out of paper")
    return [1.0 for each in episodes]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "score.py"
    path.write_text(FUNCTIONS)
    return path


def function(file: Path, name: str, **settings: Any) -> RewardConfig:
    return RewardConfig(name=name, kind="function", path=f"{file}:{name}", **settings)


def grouped(toy: Path, *rewards: RewardConfig, **changes: Any) -> PPOConfig:
    """GRPO on two prompts with four responses each, without critic and reward model."""
    settings = {"advantage": "grpo", "group_size": 4, "max_prompt_length": 40, **changes}
    config = toy_config(toy, rewards=rewards, **settings)
    return replace(config, data=replace(config.data, max_eval_rows=4))


def prompts(*wanted: float | None) -> list[Prompt]:
    rows = zip(PROMPTS, wanted, strict=False)
    return [Prompt((Message("user", "hi"),), ids, {"wanted": value}) for ids, value in rows]


def rewarded(config: PPOConfig, *wanted: float | None, **options: Any) -> ResponseRewards:
    """Of one response of two tokens to each prompt; the third is not ended."""
    responses = [Response([30, END], [-1.0, -1.0], stopped=row != 2) for row in range(len(wanted))]
    with RewardSources(config) as sources:
        models = replace(toy_models(config), sources=sources)
        submit = Submitting(sources, prompts(*wanted), models.chat)
        for index in reversed(range(len(wanted))):
            submit(index, responses[index])
        score = torch.arange(len(wanted)).float() if config.uses_reward_model else None
        stopped = torch.tensor([each.stopped for each in responses])
        return compute_rewards(models, score, stopped, config, **options)


def metrics(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "score" in line]


@pytest.mark.jobs
def test_a_step_with_a_function_alone_loads_no_reward_model_and_logs_what_it_gave(
    toy: Path, file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    config = grouped(
        toy, function(file, "length"), gold=function(file, "first_words"), output_dir=out
    )
    config = replace(config, reward=replace(config.reward, path="nowhere"), max_steps=2)

    train(config)

    for line in metrics(out):
        # The toy's responses have up to 8 tokens, so that the reward is their length in eighths.
        assert line["score"] == pytest.approx(line["response_length"] / 8)
        assert line["reward_length"] == line["score"] == line["reward_score"]
        assert 0.0 <= line["gold"] <= 1.0
        assert line["reward_failures"] == 0.0
        assert line["seconds_rewards"] >= 0.0
    figures = json.loads((out / "result.json").read_text())["eval"]
    assert figures.keys() >= {"reward_before", "reward_after", "gold_before", "gold_after", "kl"}
    assert "score_after" not in figures
    samples = json.loads((out / "samples.json").read_text())["rows"]
    given = samples[0]["answers"]["step3_ppo"]["rewards"]
    assert given.keys() == {"reward_length", "gold"}
    assert not (out / "critic").exists()


def test_a_model_s_normalized_score_is_one_more_source(toy: Path, file: Path) -> None:
    taste = RewardConfig(name="taste", kind="model", weight=0.5)
    config = grouped(toy, function(file, "wanted", weight=2.0), taste)
    models = toy_models(config)

    found = rewarded(config, 1.0, None, 3.0)

    stopped = torch.tensor([True, True, False])
    score = compute_reward(torch.arange(3).float(), stopped, models, config)  # -0.25, 0.25, -1
    assert score.tolist() == [-0.25, 0.25, -1.0]
    # Where the function doesn't apply the model has the weight of both.
    assert found.reward.tolist() == [2.0 - 0.125, 2.5 * 0.25, 6.0 - 0.5]
    assert found.by_source() == {
        "reward_wanted": [1.0, None, 3.0],
        "reward_taste": [-0.25, 0.25, -1.0],
    }


@pytest.mark.jobs
def test_a_reward_that_breaks_on_the_way_loses_nothing(
    toy: Path, file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    config = grouped(
        toy, function(file, "breaks_later"), output_dir=out, max_steps=3, save_every=1, eval_every=0
    )

    with pytest.raises(RewardError, match=r"breaks_later failed on 8 of 8.*out of paper"):
        train(config)
    steps = [line["step"] for line in metrics(out)]
    (file.parent / "mended").touch()
    train(replace(config, resume=True))

    assert 0 < len(steps) < 3
    assert [line["step"] for line in metrics(out)] == [1, 2, 3]
