"""Learning from multi-turn episodes: advantages, masks and full runs."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from pipeline.data.examples import Encoded, Message
from step3_ppo.config import PPOConfig
from step3_ppo.episodes import EpisodeResponse
from step3_ppo.experience import compute_advantages, score_responses
from step3_ppo.metrics import rollout_statistics
from step3_ppo.reward_sources import RewardSources
from step3_ppo.train import train
from step3_ppo.update import update_minibatch
from tests.step3_ppo.games import game_config, game_models
from tests.step3_ppo.test_every_method import load_actor
from tests.step3_ppo.toy import END, read_gradients, relative_error

PLAIN: dict[str, Any] = {"kl_in": "none", "loss": "none", "reuse_forward": False}
"""Plain policy gradient, which is easy to compute by hand."""


def make_two_turn_episode() -> EpisodeResponse:
    """Build an episode of two answers with an observation of three tokens between them."""
    opening, first, between, second = [1, 20, 21], [30, END], [40, 41, 42], [31, 32, END]
    ids = [*opening, *first, *between, *second]
    trained = [False] * 3 + [True] * 2 + [False] * 3 + [True] * 3
    return EpisodeResponse(
        ids=[*first, *second],
        logprobs=[-1.0] * 5,
        stopped=True,
        sequence=Encoded(ids, trained),
        opening=(Message("user", "a"),),
        turns=(Message("assistant", "b"), Message("user", "c"), Message("assistant", "d")),
    )


@torch.no_grad()
def test_gae_continues_from_one_turn_to_the_next(toy: Path) -> None:
    config = game_config(
        toy,
        "Counting",
        advantage="gae",
        group_size=1,
        gamma=0.5,
        lam=0.25,
        whiten_advantages=False,
        kl_coef=0.5,
        normalize_score=False,
    )
    models = game_models(config, RewardSources(config))
    episode = make_two_turn_episode()
    ids = torch.tensor([episode.sequence.input_ids])
    plain = AutoModelForSequenceClassification.from_pretrained(toy / "reward")
    positions = [2, 3, 7, 8, 9]  # positions before the actor's tokens
    values = (plain.model(ids).last_hidden_state[0] @ plain.score.weight[0])[positions].tolist()

    experience = score_responses(models, [[]], [episode], config)
    reward = torch.tensor([3.0])
    rollout = compute_advantages(experience, reward, config, kl_coef=0.5)

    assert experience.values is not None
    assert experience.values[0].tolist() == pytest.approx(values, abs=1e-4)
    kl = (experience.logprobs - experience.ref_logprobs)[0].tolist()
    token_rewards = [-0.5 * value for value in kl]
    token_rewards[-1] += 3.0
    advantages, advantage = [0.0] * 5, 0.0
    for t in reversed(range(5)):
        next_value = values[t + 1] if t < 4 else 0.0
        advantage = token_rewards[t] + 0.5 * next_value - values[t] + 0.5 * 0.25 * advantage
        advantages[t] = advantage
    assert rollout.advantages[0].tolist() == pytest.approx(advantages, abs=1e-4)
    assert rollout.rewards[0].tolist() == pytest.approx(token_rewards, abs=1e-6)


def test_observations_are_excluded_from_gradient_kl_and_entropy(toy: Path) -> None:
    """The update matches transformers' full logits, restricted to the actor's tokens."""
    config = game_config(toy, "Counting", rollout_size=2, batch_size=2, group_size=2, **PLAIN)
    models = game_models(config, RewardSources(config))
    episode = make_two_turn_episode()
    ids = torch.tensor([episode.sequence.input_ids])
    answer_positions = torch.tensor([3, 4, 8, 9, 10])
    plain = AutoModelForCausalLM.from_pretrained(toy / "ending")
    logits = plain(ids).logits[0]
    logits.retain_grad()
    log_policy = logits.log_softmax(-1)
    logprobs = log_policy[answer_positions - 1, ids[0, answer_positions]]
    entropy = -(log_policy.exp() * log_policy).sum(-1)[answer_positions - 1]

    experience = score_responses(models, [[], []], [episode] * 2, config)
    rollout = compute_advantages(
        experience,
        torch.tensor([1.0, 1.0]),
        replace(config, advantage="reinforce_pp", whiten_advantages=False),
        kl_coef=0.0,
    )
    statistics = rollout_statistics(rollout, torch.zeros(2))
    update_minibatch(models, rollout, [0, 1], config, ptx=None)

    assert rollout.advantages.tolist() == [[1.0] * 5] * 2
    assert rollout.micro_batch([0]).tokens.targets.tolist() == answer_positions.tolist()
    (-logprobs.mean()).backward()
    assert logits.grad is not None
    others = [index for index in range(11) if index not in (answer_positions - 1).tolist()]
    assert logits.grad[others].abs().max() == 0
    grads = read_gradients(models.actor)
    for name, param in plain.named_parameters():
        grad = next(value for key, value in grads.items() if key.endswith(name))
        assert relative_error(grad.cpu(), param.grad) < 1e-4, name
    torch.testing.assert_close(experience.logprobs[0], logprobs.detach(), atol=1e-5, rtol=1e-4)
    assert statistics["response_length"] == 5
    assert statistics["entropy"] == pytest.approx(entropy.mean().item(), rel=1e-4)


def run_config(toy: Path, out: Path, **changes: Any) -> PPOConfig:
    settings: dict[str, Any] = {
        "output_dir": out,
        "max_prompt_length": 24,
        "max_new_tokens": 24,
        "max_turns": 2,
        "max_steps": 2,
        "eval_every": 0,
        "keep_best": False,
    }
    return game_config(toy, "Counting", **settings | changes)


@pytest.mark.grid
def test_interrupted_run_resumes_bitwise_and_samples_show_dialogues(
    toy: Path, tmp_path: Path
) -> None:
    config = run_config(toy, tmp_path / "whole", save_every=1)
    resumed = tmp_path / "cut"
    train(config)
    shutil.copytree(config.output_dir, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_00000002")
    shutil.rmtree(resumed / "actor")
    (resumed / "result.json").unlink()

    train(replace(config, output_dir=resumed, resume=True))

    first, second = load_actor(config.output_dir), load_actor(resumed)
    assert all(torch.equal(first[name], second[name]) for name in first)
    text = (config.output_dir / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    steps = [line for line in lines if "turns" in line]
    assert len(steps) == 2
    for line in steps:
        assert 1.0 <= line["turns"] <= 2.0
        total = line["reward_environment_length"] + line["reward_environment_turns"]
        assert line["reward_environment"] == pytest.approx(total)
        assert line["score"] == pytest.approx(line["reward_environment"])
        assert line["rollout_gap_max"] < 1e-4
    sample = json.loads((config.output_dir / "samples.json").read_text())["rows"]
    texts = [answer["text"] for row in sample for answer in row["answers"].values()]
    assert any("[user] go on" in text for text in texts)
    assert all(row["prompt"][0]["content"].isdigit() for row in sample)
