"""Training of the methods on toy models: losses, weights, KL, missing rewards."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from step3_ppo.config import PPOConfig
from step3_ppo.experience import Experience, Rollout, compute_advantages
from step3_ppo.metrics import rollout_statistics
from tests.step3_ppo.toy import (
    ALL,
    distance,
    gradient,
    toy_config,
    toy_models,
    toy_rollout,
    updated,
)

REWARDS = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0, 1.0, 1.0, 1.0])
"""Of two groups of four, the second of equal ones."""


def grouped(toy: Path, **changes: Any) -> PPOConfig:
    """Two groups of four, one update on all of them."""
    settings = {"advantage": "rloo", "group_size": 4, "kl_in": "none", "missing_eos_score": None}
    return toy_config(toy, **{**settings, **changes})


@pytest.fixture(scope="module")
def experience(toy: Path) -> Experience:
    """Responses of the actor as it starts; three of them have an end."""
    config = grouped(toy)
    return toy_rollout(toy_models(config), config).experience


def rewarded_rollout(
    experience: Experience, config: PPOConfig, rewards: Tensor = REWARDS
) -> Rollout:
    return compute_advantages(experience, rewards, config, kl_coef=config.kl_coef)


def compute_gradient(
    experience: Experience, config: PPOConfig, rewards: Tensor = REWARDS
) -> Tensor:
    """The actor's, of one update on these responses."""
    models = toy_models(config)
    updated(models, rewarded_rollout(experience, config, rewards), config)
    return gradient(models.actor)


@pytest.mark.parametrize(
    ("loss", "aggregate"), [("gspo", "sequence"), ("cispo", "token"), ("clip", "constant")]
)
def test_no_cut_into_micro_batches_changes_a_gradient(
    toy: Path, experience: Experience, loss: str, aggregate: str
) -> None:
    settings = {"loss": loss, "aggregate": aggregate, "kl_in": "loss"}
    whole, cut = (
        compute_gradient(experience, grouped(toy, **settings, micro_batch_size=size))
        for size in (8, 1)
    )

    assert distance(cut, whole) < 1e-5


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "best", "reinforce_pp"])
def test_equal_rewards_give_a_gradient_of_exactly_0(
    toy: Path, experience: Experience, advantage: str
) -> None:
    baseline = "group" if advantage == "reinforce_pp" else "none"
    config = grouped(toy, advantage=advantage, baseline=baseline)

    found = compute_gradient(experience, config, torch.full((8,), 0.7))

    assert not found.any()


def test_a_correction_weighs_tokens_and_says_how_much(toy: Path, experience: Experience) -> None:
    config = grouped(toy, correction="truncate", correction_cap=4.0)
    rarer = replace(experience, sampled_logprobs=experience.logprobs - torch.tensor(2.0).log())

    found = compute_gradient(rarer, config)

    assert distance(found, 2 * compute_gradient(experience, grouped(toy))) < 1e-5
    statistics = rollout_statistics(rewarded_rollout(rarer, config))
    assert statistics["correction"] == pytest.approx(2.0, rel=1e-5)
    assert statistics["correction_effective"] == pytest.approx(1.0, rel=1e-5)


def test_a_response_without_a_reward_is_as_if_it_were_not_there(
    toy: Path, experience: Experience
) -> None:
    """Of four responses the last is not counted: rows of the other three alone teach the same."""
    config = grouped(toy, advantage="rloo", kl_in="loss")
    counted = torch.tensor([True] * 3 + [False] + [True] * 4)
    made = compute_advantages(experience, REWARDS, config, kl_coef=0.1, counted=counted)
    others = [row for row in ALL if row != 3]

    found: list[Tensor] = []
    for rows in (list(ALL), others):
        models = toy_models(config)
        updated(models, made, config, rows=rows)
        found.append(gradient(models.actor))

    assert made.advantages[:3, 0].tolist() == [0.75, -0.75, 0.0]
    assert distance(found[0], found[1]) < 1e-5
    statistics = rollout_statistics(made)
    assert statistics["uncounted"] == 1 / 8
    assert [statistics[f"dead_{name}"] for name in ("groups", "right", "wrong")] == [0.5, 0.5, 0.0]
    wrong = rollout_statistics(rewarded_rollout(experience, config, torch.zeros(8)))
    assert [wrong[f"dead_{name}"] for name in ("groups", "right", "wrong")] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(("gap", "corrected"), [(5e-4, False), (2e-3, True)])
def test_correction_switches_on_above_the_threshold(
    toy: Path, experience: Experience, gap: float, corrected: bool
) -> None:
    config = grouped(toy, correction="auto")
    apart = replace(experience, sampled_logprobs=experience.logprobs - gap)

    weights = rewarded_rollout(apart, config).correction

    if corrected:
        assert weights is not None
        assert weights[experience.mask].allclose(torch.tensor(gap).exp())
    else:
        assert weights is None
