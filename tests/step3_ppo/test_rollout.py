"""Experience: outputs of the models, advantages and statistics."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from inference.engine.requests import Response
from pipeline.config import LoraConfig
from pipeline.data.examples import Encoded
from pipeline.run.training import check_finite
from pipeline.system.errors import DivergedError, ModelError
from step3_ppo.experience import (
    Experience,
    Rollout,
    apply_overlong,
    compute_advantages,
    rollout_gap,
    score_responses,
)
from step3_ppo.metrics import critic_statistics, group_statistics, rollout_statistics
from step3_ppo.models import Models
from step3_ppo.rewards import compute_rewards, score_to_reward
from step3_ppo.rollout import generate_responses
from tests.step3_ppo.toy import END, PROMPTS, save_models, toy_config, toy_models

RESPONSES = [
    Response([30, 31, END], [-1.0, -1.0, -1.0], stopped=True),
    Response([40, 41, 42, 43], [-1.0] * 4, stopped=False),
    Response([END], [-1.0], stopped=True),
]


@pytest.fixture
def models(toy: Path) -> Models:
    return toy_models(toy_config(toy))


def score_test_responses(models: Models, toy: Path, **changes: object) -> Experience:
    return score_responses(models, PROMPTS[:3], RESPONSES, toy_config(toy, **changes))


@pytest.mark.parametrize("micro_batch_size", [1, 8])
@torch.no_grad()
def test_model_outputs_match_transformers(models: Models, toy: Path, micro_batch_size: int) -> None:
    actor = AutoModelForCausalLM.from_pretrained(toy / "actor")
    reward = AutoModelForSequenceClassification.from_pretrained(toy / "reward")
    mean, std = 0.5, 2.0  # the moments of toy_models
    head = reward.score.weight[0]

    experience = score_test_responses(
        models, toy, micro_batch_size=micro_batch_size, temperature=0.5
    )

    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=False)):
        ids = torch.tensor([prompt + response.ids])
        before = slice(len(prompt) - 1, ids.shape[1] - 1)  # the state before each response token
        length = len(response.ids)
        policy = torch.distributions.Categorical(logits=2 * actor(ids).logits[0, before])
        logprobs = policy.log_prob(torch.tensor(response.ids))
        scores = reward.model(ids).last_hidden_state[0] @ head
        for actual, expected in (
            (experience.logprobs[row, :length], logprobs),
            (experience.ref_logprobs[row, :length], logprobs),
            (experience.entropy[row, :length], policy.entropy()),
            (experience.values[row, :length], (scores[before] - mean) / std),
            (experience.score[row], scores[-1]),
        ):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5)


def test_fp32_head_reduces_the_gap_in_bf16(tmp_path: Path) -> None:
    save_models(tmp_path, blocks=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "actor")
    model.model.norm.weight.data.mul_(3)  # for logits of up to 20
    model.save_pretrained(tmp_path / "actor")
    config, gaps = toy_config(tmp_path, max_new_tokens=24), list[float]()
    for fp32_head in (False, True):
        actor = replace(config.actor, precision="bf16", fp32_head=fp32_head)
        changed = replace(config, actor=actor)
        models, prompts = toy_models(changed), PROMPTS * 4
        responses = generate_responses(models, prompts, changed, keys=range(32))
        experience = score_responses(models, prompts, responses, changed)
        assert torch.equal(experience.ref_logprobs, experience.logprobs)
        gaps.append(rollout_gap(experience))
    assert gaps[1] < 0.9 * gaps[0], gaps
    with pytest.raises(ModelError, match="fp32_head needs a linear output layer without an adap"):
        toy_models(replace(changed, actor=replace(actor, lora=LoraConfig(targets=("lm_head",)))))


def test_generation_and_training_agree_on_the_policy(models: Models, toy: Path) -> None:
    config = toy_config(toy, temperature=0.7, micro_batch_size=3)
    responses = generate_responses(models, PROMPTS, config, keys=range(8))
    experience = score_responses(models, PROMPTS, responses, config)
    score = score_to_reward(experience.score, experience.stopped, models, config)

    rollout = compute_advantages(experience, score, config, kl_coef=0.1)

    assert rollout_statistics(rollout)["rollout_gap"] < 1e-5
    sampled = experience.sampled_logprobs
    torch.testing.assert_close(sampled, experience.logprobs, rtol=1e-4, atol=1e-4)


def test_advantages_are_whitened_but_returns_are_not(models: Models, toy: Path) -> None:
    experience = score_test_responses(models, toy)
    mask, score = experience.mask, torch.tensor([1.0, 2.0, 3.0])
    experience = replace(experience, ref_logprobs=experience.logprobs - 0.5 * mask)

    plain, whitened = (
        compute_advantages(experience, score, toy_config(toy, lam=1.0, **changes), kl_coef=0.2)
        for changes in ({"whiten_advantages": False}, {})
    )

    torch.testing.assert_close(plain.returns[:, 0], score - 0.2 * 0.5 * mask.sum(dim=1))
    assert torch.equal(whitened.returns, plain.returns)
    expected = plain.advantages[mask]
    expected = (expected - expected.mean()) / expected.std(correction=0)
    torch.testing.assert_close(whitened.advantages[mask], expected)
    assert not whitened.advantages[~mask].any()


def test_nan_score_ends_the_run_with_and_without_a_critic(models: Models, toy: Path) -> None:
    experience, group = score_test_responses(models, toy), {"rollout_size": 3, "batch_size": 3}
    for settings in ({}, {**group, "advantage": "rloo", "group_size": 3}):
        config, score = toy_config(toy, **settings), torch.tensor([1.0, math.nan, 2.0])
        rewards = compute_rewards(models, score, experience.stopped, config)
        known = rewards.known
        rollout = compute_advantages(experience, rewards.reward, config, kl_coef=0.0, counted=known)
        with pytest.raises(DivergedError, match="reward score of iteration 1 is nan"):
            check_finite("of iteration 1", rollout_statistics(rollout, rewards.score))


@pytest.mark.parametrize(("buffer", "last"), [(0.0, [0, 0]), (1.0, [0, -1]), (0.25, [-0.5, -1])])
def test_overlong_buffer_is_a_number_or_a_fraction_of_tokens(
    toy: Path, buffer: float, last: list[float]
) -> None:
    config = toy_config(toy, overlong_buffer=buffer, missing_eos_score=None)
    trained = [[True], [True] * 6, [True] * 7, [True] + [False] * 5 + [True] * 2]  # of at most 8
    sequences = [Encoded([0] * (1 + len(t)), [False, *t]) for t in trained]
    rewards, counted = apply_overlong(torch.zeros(4), sequences, torch.ones(4).bool(), config)
    assert rewards.tolist() == [0, 0, *last]
    assert counted.all()


def test_statistics_match_hand_computed_values(toy: Path, models: Models) -> None:
    experience = score_test_responses(models, toy)
    mask = experience.mask
    experience = replace(
        experience,
        logprobs=-1.0 * mask,
        ref_logprobs=-1.5 * mask,
        sampled_logprobs=-1.25 * mask,
        entropy=2.0 * mask,
        values=0.5 * mask,
        score=torch.tensor([1.0, 2.0, 6.0]),
    )
    score = torch.tensor([1.0, 0.0, 2.0])
    config = toy_config(toy, whiten_advantages=False, lam=1.0)

    rollout = compute_advantages(experience, score, config, kl_coef=0.0)
    rollout = replace(rollout, correction=torch.tensor([[1.0], [3.0], [0.0]]) * mask)
    statistics = rollout_statistics(rollout)
    rewards, zeros = torch.tensor([1.0, 1, 0, 0, 0, 2, 5, 7]), torch.zeros(8, 1)
    groups = Rollout(experience, rewards, zeros, zeros, None, torch.arange(8) < 7, group_size=2)
    dead = {"dead_groups": 0.75, "dead_right": 0.5, "dead_wrong": 0.25}

    expected = {
        "score": 3.0,
        "score_std": (14 / 3) ** 0.5,
        "score_stderr": (14 / 2 / 3) ** 0.5,
        "reward_score": 1.0,
        "uncounted": 0.0,
        "kl": 0.5 * 8 / 3,
        "kl_k3": (2.718281828**-0.5 - 0.5) * 8 / 3,
        "entropy": 2.0,
        "value": 0.5,
        "explained_variance": 0.0,  # a constant critic
        "response_length": 8 / 3,
        "stop_rate": 2 / 3,
        "repetition": 0.0,
        "rollout_gap": 0.25,
        "rollout_gap_max": 0.25,
        "correction": 15 / 8,
        "correction_effective": 15**2 / (8 * 39),
    }
    is_counted = torch.tensor([True, False, True])
    accurate = replace(experience, values=rollout.returns + 9 * ~is_counted[:, None])
    exact = critic_statistics(replace(rollout, experience=accurate, counted=is_counted))
    assert exact["explained_variance"] == 1.0
    assert group_statistics(groups) == pytest.approx({"group_std": 2**0.5 / 4, **dead})
    assert statistics == pytest.approx(expected, abs=1e-6)
