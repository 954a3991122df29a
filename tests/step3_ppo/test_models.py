"""The four models: the reference and the initial critic."""

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
from tests.step3_ppo.toy import flat_weights, run_update, toy_config, toy_models, toy_rollout

BATCH = collate([Encoded([1, 20, 21, 30, 2], [False] * 3 + [True] * 2)])


def test_reference_stays_the_initial_actor(toy: Path) -> None:
    config = toy_config(toy)
    models = toy_models(config)
    before = models.reference.logprobs([BATCH], temperature=1.0)[0]

    update_policy(models, toy_rollout(models, config), config, step=1, ema=None, ptx=None)

    assert torch.equal(models.reference.logprobs([BATCH], temperature=1.0)[0], before)
    assert not torch.equal(models.actor(BATCH).logprobs, before)


def test_reference_with_lora_is_the_actor_without_adapter(toy: Path) -> None:
    """It equals a frozen copy bitwise."""
    config = toy_config(toy)
    lora = LoraConfig(rank=4, lr=0.05)
    config = replace(config, actor=replace(config.actor, lora=lora))
    models, copy = toy_models(config), toy_models(toy_config(toy)).reference
    update_policy(models, toy_rollout(models, config), config, step=1, ema=None, ptx=None)

    adapted = models.actor(BATCH, temperature=0.5).logprobs
    off = models.reference.logprobs([BATCH], temperature=0.5)[0]

    assert models.reference.engine is models.actor
    assert torch.equal(off, copy.logprobs([BATCH], temperature=0.5)[0])
    assert not torch.equal(adapted, off)
    assert models.policy.training  # the reference's pass doesn't change the actor's mode
    assert torch.equal(models.actor(BATCH, temperature=0.5).logprobs, adapted)


def test_without_kl_penalty_no_reference_is_loaded(toy: Path) -> None:
    no_reference = toy_config(toy, kl_in="loss", kl_coef=0.0, value_clip=None)
    with_reference = replace(no_reference, reference=FrozenModelConfig(path=str(toy / "actor")))
    results: list[torch.Tensor] = []

    for config in (no_reference, with_reference):
        models = toy_models(config)
        rollout = toy_rollout(models, config)
        run_update(models, rollout, config)
        results.append(flat_weights(models.policy))
        roles = {model.role for model in config.workload(1).models}
        has_reference = [models.reference is not None, "reference" in roles]
        assert [*has_reference, "kl" in rollout_statistics(rollout)] == [
            config is with_reference
        ] * 3

    assert torch.equal(*results)
    assert PPOConfig(kl_coef=0.0, output_dir=Path("out/step3_ppo")).reference_role is None
    compared = PPOConfig(method="dapo", kl_in="none", output_dir=Path("out/step3_dapo"))
    assert compared.reference_role == "reference"
    guard = GuardConfig(signal="kl", limit=20.0)
    with pytest.raises(ConfigError, match=r"kl can't be measured without a reference; set ppo.ref"):
        PPOConfig(kl_in="none", guards=(guard,))


def test_critic_starts_as_the_normalized_reward_model(toy: Path) -> None:
    models = toy_models(toy_config(toy))

    values = models.critic(BATCH)

    # Critic and reward model agree on every prefix.
    for target, value in zip(BATCH.targets.tolist(), values, strict=True):
        prefix = collate([Encoded.untrained(BATCH.input_ids[:target].tolist())])
        expected = models.reward.normalize(models.reward.scores([prefix])[0])[0]
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
