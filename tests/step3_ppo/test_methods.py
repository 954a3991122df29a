"""Updates of the methods on toy models: micro-batches, corrections, missing rewards."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from step3_ppo.config import PPOConfig
from step3_ppo.experience import Experience, Rollout, compute_advantages
from step3_ppo.methods import ESTIMATOR_NEEDS
from step3_ppo.metrics import rollout_statistics
from tests.step3_ppo.toy import (
    ALL_ROWS,
    read_flat_gradient,
    relative_error,
    run_update,
    toy_config,
    toy_models,
    toy_rollout,
)

REWARDS = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0, 1.0, 1.0, 1.0])
"""Rewards of two groups of four; those of the second are equal."""


def group_config(toy: Path, **changes: Any) -> PPOConfig:
    """Return settings of two groups of four responses in one update."""
    settings = {"advantage": "rloo", "group_size": 4, "kl_in": "none", "missing_eos_score": None}
    return toy_config(toy, **{**settings, **changes})


@pytest.fixture(scope="module")
def experience(toy: Path) -> Experience:
    """Responses of the initial actor; three of them stop."""
    config = group_config(toy)
    return toy_rollout(toy_models(config), config).experience


def rewarded_rollout(
    experience: Experience, config: PPOConfig, rewards: Tensor = REWARDS
) -> Rollout:
    return compute_advantages(experience, rewards, config, kl_coef=config.kl_coef)


def compute_gradient(
    experience: Experience, config: PPOConfig, rewards: Tensor = REWARDS
) -> Tensor:
    """Return the actor's gradient of one update on these responses."""
    models = toy_models(config)
    run_update(models, rewarded_rollout(experience, config, rewards), config)
    return read_flat_gradient(models.actor)


@pytest.mark.parametrize(
    ("loss", "aggregate"), [("gspo", "sequence"), ("cispo", "token"), ("clip", "constant")]
)
def test_gradient_does_not_depend_on_micro_batch_size(
    toy: Path, experience: Experience, loss: str, aggregate: str
) -> None:
    settings = {"loss": loss, "aggregate": aggregate, "kl_in": "loss"}
    full, split = (
        compute_gradient(experience, group_config(toy, **settings, micro_batch_size=size))
        for size in (8, 1)
    )

    assert relative_error(split, full) < 1e-5


@pytest.mark.parametrize("advantage", sorted(ESTIMATOR_NEEDS.keys() - {"gae"}))
def test_equal_rewards_give_a_gradient_of_exactly_0(
    toy: Path, experience: Experience, advantage: str
) -> None:
    baseline = "group" if advantage == "reinforce_pp" else "none"
    config = group_config(toy, advantage=advantage, baseline=baseline)

    grad = compute_gradient(experience, config, torch.full((8,), 0.7))

    assert not grad.any()


def test_correction_weights_tokens_and_is_reported(toy: Path, experience: Experience) -> None:
    config = group_config(toy, correction="truncate", correction_cap=4.0)
    off_policy = replace(experience, sampled_logprobs=experience.logprobs - torch.tensor(2.0).log())

    actual = compute_gradient(off_policy, config)

    assert relative_error(actual, 2 * compute_gradient(experience, group_config(toy))) < 1e-5
    statistics = rollout_statistics(rewarded_rollout(off_policy, config))
    assert statistics["correction"] == pytest.approx(2.0, rel=1e-5)
    assert statistics["correction_effective"] == pytest.approx(1.0, rel=1e-5)


def test_response_without_reward_does_not_affect_the_gradient(
    toy: Path, experience: Experience
) -> None:
    """An update without the uncounted response has the same gradient."""
    config = group_config(toy, advantage="rloo", kl_in="loss")
    counted = torch.tensor([True] * 3 + [False] + [True] * 4)
    rollout = compute_advantages(experience, REWARDS, config, kl_coef=0.1, counted=counted)
    others = [row for row in ALL_ROWS if row != 3]

    grads: list[Tensor] = []
    for rows in (list(ALL_ROWS), others):
        models = toy_models(config)
        run_update(models, rollout, config, rows=rows)
        grads.append(read_flat_gradient(models.actor))

    assert rollout.advantages[:3, 0].tolist() == [0.75, -0.75, 0.0]
    assert relative_error(grads[0], grads[1]) < 1e-5
    statistics = rollout_statistics(rollout)
    assert statistics["uncounted"] == 1 / 8
    assert [statistics[f"dead_{name}"] for name in ("groups", "right", "wrong")] == [0.5, 0.5, 0.0]
    failed = rollout_statistics(rewarded_rollout(experience, config, torch.zeros(8)))
    assert [failed[f"dead_{name}"] for name in ("groups", "right", "wrong")] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(("gap", "corrected"), [(5e-4, False), (2e-3, True)])
def test_correction_switches_on_above_the_threshold(
    toy: Path, experience: Experience, gap: float, corrected: bool
) -> None:
    config = group_config(toy, correction="auto")
    off_policy = replace(experience, sampled_logprobs=experience.logprobs - gap)

    weights = rewarded_rollout(off_policy, config).correction

    if corrected:
        assert weights is not None
        assert weights[experience.mask].allclose(torch.tensor(gap).exp())
    else:
        assert weights is None
