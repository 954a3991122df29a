"""The four models: what the reference is, what the critic starts as, what may not be combined."""

from dataclasses import replace
from pathlib import Path

import torch

from pipeline.config import LoraConfig, OptimConfig, TrainedModelConfig
from pipeline.data.batches import collate
from pipeline.data.examples import Encoded
from pipeline.demo.model import build_tokenizer
from pipeline.engine.engine import Engine
from pipeline.models.chat import load_chat
from pipeline.models.forward import Policy, base_model
from pipeline.models.passes import Passes
from pipeline.models.trained import trained_causal_lm
from step3_ppo.config import PPOConfig
from step3_ppo.models import load_reference
from step3_ppo.reward_model import stored_normalization
from step3_ppo.update import update_policy
from tests.families import tiny_causal_lm
from tests.step3_ppo.toy import toy_config, toy_models, toy_rollout, weights

CPU = torch.device("cpu")
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


def test_a_reference_of_its_own_is_used_also_with_lora(toy: Path, tmp_path: Path) -> None:
    other = tiny_causal_lm("llama", seed=9, vocab_size=len(build_tokenizer()))
    other.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    config = with_lora(toy_config(toy))
    config = replace(config, reference=replace(config.reference, path=str(tmp_path)))

    models = toy_models(config)

    assert torch.equal(weights(models.reference.engine.model), weights(other))


def test_the_reference_of_an_actor_with_new_tokens_has_the_same_rows_for_them(toy: Path) -> None:
    config = toy_config(toy)
    config = replace(config, data=replace(config.data, format="chatml"))
    tokenizer, _ = load_chat(config.actor, config.data)
    actor = trained_causal_lm(config.actor, tokenizer, device=CPU, seed=config.seed)

    engine = Engine(Policy(actor), config.actor, total_steps=1)
    reference = load_reference(config, Passes(engine), tokenizer, device=CPU)

    assert base_model(actor).get_input_embeddings().weight.shape[0] == len(build_tokenizer()) + 2
    assert torch.equal(weights(reference.engine.model), weights(actor))


def test_reference_and_reward_model_have_no_gradients(toy: Path) -> None:
    models = toy_models(toy_config(toy))

    for frozen in (models.reference.engine.model, models.reward.engine.model):
        assert not any(param.requires_grad for param in frozen.parameters())


def test_the_critic_starts_as_the_normalized_reward_model(toy: Path) -> None:
    models = toy_models(toy_config(toy))

    values = models.critic(BATCH)

    # Critic and reward model agree about every prefix.
    for target, value in zip(BATCH.targets.tolist(), values, strict=True):
        prefix = collate([Encoded.untrained(BATCH.input_ids[:target].tolist())])
        expected = models.reward.normalized(models.reward.scores([prefix])[0])[0]
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    assert (models.reward.mean, models.reward.std) == (0.5, 2.0)


def test_without_normalization_the_critic_is_the_raw_reward_model(toy: Path) -> None:
    raw = toy_models(toy_config(toy, normalize_score=False))
    normalized = toy_models(toy_config(toy))

    torch.testing.assert_close(raw.critic(BATCH), normalized.critic(BATCH) * 2.0 + 0.5)


def test_a_model_given_in_python_without_an_optimizer_learns_at_ppos_rate() -> None:
    config = PPOConfig(
        actor=TrainedModelConfig(path="somewhere", zero_stage=2),
        critic=TrainedModelConfig(path="elsewhere"),
    )

    assert config.actor == replace(PPOConfig().actor, path="somewhere", zero_stage=2)
    assert (config.actor.optim.lr, config.critic.optim.lr) == (1e-6, 9e-6)
    assert config.actor.optim.eps == 1e-5
    own = OptimConfig(lr=1e-5)  # said, though it is what the class has
    assert PPOConfig(actor=TrainedModelConfig(optim=own)).actor.optim.lr == 1e-5


def test_scores_without_stored_moments_stay_as_they_are(toy: Path) -> None:
    actor = toy_models(toy_config(toy)).policy

    assert stored_normalization(actor) == (0.0, 1.0)
