"""Learning from episodes of several turns: estimates, masks, end-to-end runs."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
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
from tests.step3_ppo.toy import END, distance, gradients

STILL: dict[str, Any] = {"kl_in": "none", "loss": "none", "reuse_forward": False}
"""Plain policy gradient, so that a gradient is that of a sum by hand."""


def two_turns() -> EpisodeResponse:
    """An episode of two answers by hand, with an observation of three tokens between them."""
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


def critic_config(toy: Path) -> PPOConfig:
    return game_config(
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


@torch.no_grad()
def test_gae_goes_from_the_last_token_of_a_turn_to_the_first_of_the_next(toy: Path) -> None:
    config = critic_config(toy)
    models = game_models(config, RewardSources(config))
    episode = two_turns()
    ids = torch.tensor([episode.sequence.input_ids])
    plain = AutoModelForSequenceClassification.from_pretrained(toy / "reward")
    at = [2, 3, 7, 8, 9]  # the positions before the actor's tokens
    values = (plain.model(ids).last_hidden_state[0] @ plain.score.weight[0])[at].tolist()

    experience = score_responses(models, [[]], [episode], config)
    reward = torch.tensor([3.0])
    rollout = compute_advantages(experience, reward, config, kl_coef=0.5)

    assert experience.values is not None
    assert experience.values[0].tolist() == pytest.approx(values, abs=1e-4)
    kl = (experience.logprobs - experience.ref_logprobs)[0].tolist()
    token_rewards = [-0.5 * each for each in kl]
    token_rewards[-1] += 3.0
    advantages, later = [0.0] * 5, 0.0
    for t in reversed(range(5)):
        following = values[t + 1] if t < 4 else 0.0
        later = token_rewards[t] + 0.5 * following - values[t] + 0.5 * 0.25 * later
        advantages[t] = later
    assert rollout.advantages[0].tolist() == pytest.approx(advantages, abs=1e-4)
    assert rollout.rewards[0].tolist() == pytest.approx(token_rewards, abs=1e-6)


def test_observations_have_no_gradient_no_kl_and_no_entropy(toy: Path) -> None:
    """The update is that of the actor's tokens alone, by plain transformers on whole logits."""
    config = game_config(toy, "Counting", rollout_size=2, batch_size=2, group_size=2, **STILL)
    models = game_models(config, RewardSources(config))
    episode = two_turns()
    ids = torch.tensor([episode.sequence.input_ids])
    own = torch.tensor([3, 4, 8, 9, 10])
    plain = AutoModelForCausalLM.from_pretrained(toy / "ending")
    logits = plain(ids).logits[0]
    logits.retain_grad()
    policy = logits.log_softmax(-1)
    logprobs = policy[own - 1, ids[0, own]]
    entropy = -(policy.exp() * policy).sum(-1)[own - 1]

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
    assert rollout.minibatch([0]).tokens.targets.tolist() == own.tolist()
    (-logprobs.mean()).backward()
    assert logits.grad is not None
    others = [at for at in range(11) if at not in (own - 1).tolist()]
    assert logits.grad[others].abs().max() == 0
    found = gradients(models.actor)
    for name, param in plain.named_parameters():
        got = next(value for key, value in found.items() if key.endswith(name))
        assert distance(got.cpu(), param.grad) < 1e-4, name
    torch.testing.assert_close(experience.logprobs[0], logprobs.detach(), atol=1e-5, rtol=1e-4)
    assert statistics["response_length"] == 5
    assert statistics["entropy"] == pytest.approx(entropy.mean().item(), rel=1e-4)


def exported(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "actor" / "model.safetensors")


def of_game(toy: Path, out: Path, **changes: Any) -> PPOConfig:
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
def test_a_run_that_was_cut_ends_in_the_same_weights_and_its_samples_show_the_dialogue(
    toy: Path, tmp_path: Path
) -> None:
    config = of_game(toy, tmp_path / "whole", save_every=1)
    cut = tmp_path / "cut"
    train(config)
    shutil.copytree(config.output_dir, cut)
    shutil.rmtree(cut / "checkpoints" / "step_00000002")
    shutil.rmtree(cut / "actor")
    (cut / "result.json").unlink()

    train(replace(config, output_dir=cut, resume=True))

    first, second = exported(config.output_dir), exported(cut)
    assert all(torch.equal(first[name], second[name]) for name in first)
    text = (config.output_dir / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    steps = [line for line in lines if "turns" in line]
    assert len(steps) == 2
    for line in steps:
        assert 1.0 <= line["turns"] <= 2.0
        parts = line["reward_environment_length"] + line["reward_environment_turns"]
        assert line["reward_environment"] == pytest.approx(parts)
        assert line["score"] == pytest.approx(line["reward_environment"])
        assert line["rollout_gap_max"] < 1e-4
    sample = json.loads((config.output_dir / "samples.json").read_text())["rows"]
    texts = [answer["text"] for row in sample for answer in row["answers"].values()]
    assert any("[user] go on" in text for text in texts)
    assert all(row["prompt"][0]["content"].isdigit() for row in sample)
