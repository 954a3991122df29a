"""Step 3 with reward functions, instead of a reward model or in addition to it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation.held_out import Prompt
from inference.engine.requests import Response
from pipeline.data.examples import Message
from rewards.config import RewardConfig
from rewards.contract import Episode, SourceResults
from rewards.workers import RewardError
from step3_ppo.config import PPOConfig
from step3_ppo.reward_sources import ResponseSubmitter, RewardSources
from step3_ppo.rewards import ResponseRewards, compute_rewards, score_to_reward
from step3_ppo.train import train
from tests.step3_ppo.toy import END, PROMPTS, toy_config, toy_models
from tests.test_resume import read_metric, read_metrics

FUNCTIONS = """
from pathlib import Path

def length(episodes):
    return [episode.num_tokens / 8 for episode in episodes]

def wanted(episodes):
    return [episode.extra["wanted"] for episode in episodes]

def one_line(episodes):
    return [float(episode.response[:1].isalpha()) for episode in episodes]

def raises(episodes):
    raise ValueError("no such answer")

def breaks_later(episodes):
    here = Path(__file__).parent
    calls = here / "calls"
    calls.write_text(calls.read_text() + "." if calls.exists() else ".")
    if len(calls.read_text()) > 4 and not (here / "fixed").exists():
        raise RuntimeError("out of paper")
    return [1.0 for _ in episodes]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "score.py"
    path.write_text(FUNCTIONS)
    return path


def make_source(file: Path, name: str, **settings: Any) -> RewardConfig:
    return RewardConfig(name=name, kind="function", path=f"{file}:{name}", **settings)


def group_config(toy: Path, *rewards: RewardConfig, **changes: Any) -> PPOConfig:
    """Return settings of GRPO on two prompts with four responses each."""
    settings = {"advantage": "grpo", "group_size": 4, "max_prompt_length": 40, **changes}
    config = toy_config(toy, rewards=rewards, **settings)
    return replace(config, data=replace(config.data, max_eval_rows=4))


def compute_test_rewards(
    config: PPOConfig, *wanted: float | None, **options: Any
) -> ResponseRewards:
    """Return rewards of one response of two tokens per prompt; the third doesn't stop."""
    responses = [Response([30, END], [-1.0, -1.0], stopped=row != 2) for row in range(len(wanted))]
    with RewardSources(config) as sources:
        models = replace(toy_models(config), sources=sources)
        rows = zip(PROMPTS, wanted, strict=False)
        prompts = [Prompt((Message("user", "hi"),), ids, {"wanted": value}) for ids, value in rows]
        submit = ResponseSubmitter(sources, prompts, models.chat)
        for index in reversed(range(len(wanted))):
            submit(index, responses[index])
        score = torch.arange(len(wanted)).float() if config.uses_reward_model else None
        stopped = torch.tensor([response.stopped for response in responses])
        return compute_rewards(models, score, stopped, config, **options)


@pytest.mark.jobs
def test_reward_function_alone_needs_no_reward_model(toy: Path, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = group_config(
        toy, make_source(file, "length"), gold=make_source(file, "one_line"), output_dir=out
    )
    config = replace(config, reward=replace(config.reward, path="nowhere"), max_steps=2)

    train(config)

    for line in (line for line in read_metrics(out) if "score" in line):
        # Responses have up to 8 tokens, and the reward is their length in eighths.
        assert line["score"] == pytest.approx(line["response_length"] / 8)
        assert line["reward_length"] == line["score"] == line["reward_score"]
        assert 0.0 <= line["gold"] <= 1.0
        assert line["reward_failures"] == 0.0
    figures = json.loads((out / "result.json").read_text())["eval"]
    assert figures.keys() >= {"reward_before", "reward_after", "gold_before", "gold_after", "kl"}
    assert "score_after" not in figures
    samples = json.loads((out / "samples.json").read_text())["rows"]
    sample_rewards = samples[0]["answers"]["step3_ppo"]["rewards"]
    assert sample_rewards.keys() == {"reward_length", "gold"}
    assert not (out / "critic").exists()


def test_normalized_model_score_is_combined_with_functions(toy: Path, file: Path) -> None:
    taste = RewardConfig(name="taste", kind="model", weight=0.5)
    config = group_config(toy, make_source(file, "wanted", weight=2.0), taste)
    models = toy_models(config)

    rewards = compute_test_rewards(config, 1.0, None, 3.0)

    stopped = torch.tensor([True, True, False])
    score = score_to_reward(torch.arange(3).float(), stopped, models, config)  # -0.25, 0.25, -1
    assert score.tolist() == [-0.25, 0.25, -1.0]
    # If the function doesn't apply, the model has the weight of both.
    assert rewards.reward.tolist() == [2.0 - 0.125, 2.5 * 0.25, 6.0 - 0.5]
    assert rewards.by_source() == {
        "reward_wanted": [1.0, None, 3.0],
        "reward_taste": [-0.25, 0.25, -1.0],
    }


def test_seconds_of_several_rounds_of_results_add_up(toy: Path, file: Path) -> None:
    with RewardSources(group_config(toy, make_source(file, "length"))) as sources:
        sources.submit([Episode((), "yes")])
        sources.results()
        first = sources.seconds
        sources.results()

        assert sources.seconds >= first > 0


def test_gold_without_values_has_no_standard_error() -> None:
    gold = {"gold": SourceResults([None, None], [None, None])}
    rewards = ResponseRewards(torch.zeros(2), torch.zeros(2), gold)

    assert rewards.metrics() == {"reward_failures": 0.0, "seconds_rewards": 0.0}


def test_failing_function_ends_the_run_before_training(toy: Path, file: Path) -> None:
    with pytest.raises(RewardError, match=r"raises failed on 4 of 4.*no such answer"):
        train(group_config(toy, make_source(file, "raises"), output_dir=file.parent / "out"))


@pytest.mark.jobs
def test_run_resumes_after_a_reward_function_fails(toy: Path, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = group_config(
        toy,
        make_source(file, "breaks_later"),
        output_dir=out,
        max_steps=3,
        save_every=1,
        eval_every=2,  # breaks in the first evaluation
    )

    with pytest.raises(RewardError, match=r"breaks_later failed on 4 of 4.*out of paper"):
        train(config)
    scores = read_metric(config, "score")
    (file.parent / "fixed").touch()
    train(replace(config, resume=True))

    assert 0 < len(scores) < 3
    assert [line["step"] for line in read_metrics(out) if "score" in line] == [1, 2, 3]
