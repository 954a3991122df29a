"""Several responses to each prompt, without a critic: cut, trained and written."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from step3_ppo.config import PPOConfig
from step3_ppo.experience import compute_advantages, score_responses
from step3_ppo.rewards import compute_reward
from step3_ppo.rollout import generate_responses
from step3_ppo.train import train
from tests.step3_ppo.toy import PROMPTS, toy_config, toy_models

GROUP = {"advantage": "grpo", "group_size": 4}


def grouped(toy: Path, out: Path, **changes: object) -> PPOConfig:
    config = toy_config(
        toy, output_dir=out, max_steps=2, max_prompt_length=40, **{**GROUP, **changes}
    )
    return replace(config, data=replace(config.data, max_eval_rows=4))


def read_metrics(out: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "policy_loss" in line]


@pytest.mark.jobs
def test_without_a_critic_none_is_loaded_trained_or_written(toy: Path, tmp_path: Path) -> None:
    # Responses without an end would all count -1.
    config = grouped(toy, tmp_path, missing_eos_score=None)
    (tmp_path / "critic").mkdir()  # of an earlier run
    without = replace(config, critic=replace(config.critic, path=str(tmp_path / "nowhere")))

    train(without)

    lines = read_metrics(tmp_path)
    assert len(lines) == 2
    assert not {"value", "value_loss", "explained_variance", "critic_lr"} & set(lines[-1])
    assert lines[0]["group_std"] > 0
    assert lines[0]["dead_groups"] == 0
    assert (tmp_path / "actor" / "config.json").is_file()
    assert not (tmp_path / "critic").exists()
    assert not [use for use in config.workload(1).models if use.role == "critic"]


def test_the_responses_to_a_prompt_differ_and_stand_together(toy: Path) -> None:
    config = toy_config(toy, **GROUP)
    models = toy_models(config)
    prompts = [PROMPTS[0]] * 4 + [PROMPTS[1]] * 4

    responses = generate_responses(models, prompts, config, keys=range(8))
    experience = score_responses(models, prompts, responses, config)
    score = compute_reward(experience.score, experience.stopped, models, config)
    rollout = compute_advantages(experience, score, config, kl_coef=0.0)

    whole = sum(map(len, experience.sequences))
    shared = rollout.minibatch(range(8)).tokens
    assert shared.num_tokens == whole - 3 * len(PROMPTS[0]) - 3 * len(PROMPTS[1])
    apart = replace(experience, shares_prompts=False)
    logprobs = models.actor(replace(rollout, experience=apart).minibatch(range(8)).tokens).logprobs
    torch.testing.assert_close(experience.logprobs[experience.mask], logprobs, rtol=0, atol=1e-5)

    assert len({tuple(response.ids) for response in responses[:4]}) > 1
    of_response = rollout.advantages[:, 0].view(2, 4)  # each token's is that of the response
    torch.testing.assert_close(of_response.sum(dim=1), torch.zeros(2), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        of_response.argmax(dim=1), rollout.reward_score.view(2, 4).argmax(dim=1)
    )
