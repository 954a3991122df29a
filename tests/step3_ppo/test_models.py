"""The four models: what the reference is, what the critic starts as, what may not be combined."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.config import FrozenModelConfig, LoraConfig
from pipeline.data.batches import collate
from pipeline.data.examples import Encoded
from pipeline.system.errors import ConfigError
from step3_ppo.config import PPOConfig
from step3_ppo.guard_settings import GuardConfig
from step3_ppo.metrics import rollout_statistics
from step3_ppo.update import update_policy
from tests.step3_ppo.toy import toy_config, toy_models, toy_rollout, updated, weights

BATCH = collate([Encoded([1, 20, 21, 30, 2], [False] * 3 + [True] * 2)])


def with_lora(config: PPOConfig) -> PPOConfig:
    return replace(config, actor=replace(config.actor, lora=LoraConfig(rank=4, lr=0.05)))


def test_the_reference_is_the_actor_as_it_started_whatever_the_actor_learns(toy: Path) -> None:
    config = toy_config(toy)
    models = toy_models(config)
    before = models.reference.logprobs([BATCH], temperature=1.0)[0]

    update_policy(models, toy_rollout(models, config), config, step=1, ema=None, ptx=None)

    assert torch.equal(models.reference.logprobs([BATCH], temperature=1.0)[0], before)
    assert not torch.equal(models.actor(BATCH).logprobs, before)


def test_with_lora_the_reference_is_the_actor_with_its_adapter_off(toy: Path) -> None:
    """The same, bit for bit, as a frozen copy, and without one."""
    config = with_lora(toy_config(toy))
    models, copy = toy_models(config), toy_models(toy_config(toy)).reference
    update_policy(models, toy_rollout(models, config), config, step=1, ema=None, ptx=None)

    adapted = models.actor(BATCH, temperature=0.5).logprobs
    off = models.reference.logprobs([BATCH], temperature=0.5)[0]

    assert models.reference.engine is models.actor
    assert torch.equal(off, copy.logprobs([BATCH], temperature=0.5)[0])
    assert not torch.equal(adapted, off)
    assert models.policy.training  # asking the reference left the actor as it was
    assert torch.equal(models.actor(BATCH, temperature=0.5).logprobs, adapted)


def test_without_a_penalty_there_is_no_reference_and_the_same_update(toy: Path) -> None:
    apart = toy_config(toy, kl_in="loss", kl_coef=0.0, value_clip=None)
    beside = replace(apart, reference=FrozenModelConfig(path=str(toy / "actor")))
    found: list[torch.Tensor] = []

    for config in (apart, beside):
        models = toy_models(config)
        rollout = toy_rollout(models, config)
        updated(models, rollout, config)
        found.append(weights(models.policy))
        roles = {model.role for model in config.workload(1).models}
        found_there = [models.reference is not None, "reference" in roles]
        assert [*found_there, "kl" in rollout_statistics(rollout)] == [config is beside] * 3

    assert torch.equal(*found)
    assert PPOConfig(kl_coef=0.0, output_dir=Path("out/step3_ppo")).reference_role is None
    compared = PPOConfig(method="dapo", kl_in="none", output_dir=Path("out/step3_dapo"))
    assert compared.reference_role == "reference"
    guard = GuardConfig(signal="kl", limit=20.0)
    with pytest.raises(ConfigError, match=r"kl can't be measured without a reference; set ppo.ref"):
        PPOConfig(kl_in="none", guards=(guard,))


def test_the_critic_starts_as_the_normalized_reward_model(toy: Path) -> None:
    models = toy_models(toy_config(toy))

    values = models.critic(BATCH)

    # Critic and reward model agree about every prefix.
    for target, value in zip(BATCH.targets.tolist(), values, strict=True):
        prefix = collate([Encoded.untrained(BATCH.input_ids[:target].tolist())])
        expected = models.reward.normalized(models.reward.scores([prefix])[0])[0]
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
