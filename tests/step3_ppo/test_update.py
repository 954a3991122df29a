"""PPO's updates: ratios, gradients, stopping and statistics."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from step3_ppo.experience import compute_advantages, score_responses
from step3_ppo.metrics import rollout_statistics
from step3_ppo.rewards import ResponseRewards, score_to_reward
from step3_ppo.rollout import generate_responses
from step3_ppo.update import PtxStream, fit_values, update_policy
from tests.distributed import rank, run_ranks, world_size
from tests.pipeline.engine.inspection import get_gradients
from tests.step3_ppo.toy import (
    ALL_ROWS,
    PROMPTS,
    flat_weights,
    read_flat_gradient,
    read_gradients,
    relative_error,
    run_update,
    toy_config,
    toy_models,
    toy_rollout,
)


def test_first_minibatch_has_a_ratio_of_exactly_1(toy: Path) -> None:
    config = toy_config(toy)
    models = toy_models(config)

    metrics = run_update(models, toy_rollout(models, config), config).metrics

    assert metrics["ratio_max"] == metrics["ratio_mean"] == 1.0
    assert metrics["approx_kl"] == metrics["clip_fraction"] == 0.0
    assert metrics["value_clip_fraction"] == 0.0


def test_line_of_the_first_values_has_the_mean_and_the_scale_of_the_returns(toy: Path) -> None:
    config = toy_config(toy)
    models = toy_models(config)
    models.set_value_line(1.0, 0.0)
    rollout = toy_rollout(models, config)
    mask, scores, values = rollout.experience.mask, rollout.reward_score, rollout.experience.values
    returns = scores[:, None].expand_as(mask)[mask]  # without KL, every token's return

    def fit(values: Tensor, rewards: Tensor) -> tuple[float, float]:
        experience = replace(rollout.experience, values=values)
        return fit_values(experience, ResponseRewards(rewards, rewards), config, kl_coef=0.1)

    line = fit(values, scores)
    models.set_value_line(*line)
    after = toy_rollout(models, config).experience.values[mask]

    assert abs(np.corrcoef(values[mask], returns)[0, 1]) < 0.5  # the assumed correlation
    torch.testing.assert_close(after.mean(), returns.mean())
    torch.testing.assert_close(after.std(), 0.5 * returns.std())
    correlated = 0.1 * values + scores[:, None]
    expected = np.polyfit(correlated[mask].double(), returns.double(), 1)
    assert fit(correlated, scores) == pytest.approx(expected, rel=1e-4)
    # Without variance the critic keeps its scale, so that it can learn.
    assert fit(0 * values + 3, scores) == pytest.approx((1, returns.mean().item() - 3))
    assert fit(values, torch.ones(8)) == pytest.approx((1, 1 - values[mask].mean().item()))


@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
def test_gradients_match_the_formulas_per_sequence(toy: Path, aggregate: str) -> None:
    """At ratio 1 they are -A grad log pi and (V - R) grad V; the latter is averaged over tokens."""
    config = toy_config(toy, entropy_coef=0.1, aggregate=aggregate)
    models = toy_models(config)
    rollout = toy_rollout(models, config)
    actor = AutoModelForCausalLM.from_pretrained(toy / "actor")
    critic = AutoModelForSequenceClassification.from_pretrained(toy / "reward")
    num_tokens = int(rollout.experience.mask.sum())

    run_update(models, rollout, config)

    for row, sequence in enumerate(rollout.experience.sequences):
        ids = torch.tensor([sequence.input_ids])
        length = sum(sequence.trained)
        before = slice(ids.shape[1] - length - 1, ids.shape[1] - 1)
        policy = torch.distributions.Categorical(logits=actor(ids).logits[0, before])
        logprobs = policy.log_prob(ids[0, -length:])
        objective = rollout.advantages[row, :length] @ logprobs + 0.1 * policy.entropy().sum()
        divisor = {"token": num_tokens, "sequence": 8 * length, "constant": 8 * 8}[aggregate]
        (-objective / divisor).backward()
        hidden = critic.model(ids).last_hidden_state[0, before]
        values = (hidden @ critic.score.weight[0] - 0.5) / 2.0
        (0.5 * (values - rollout.returns[row, :length]).square().sum() / num_tokens).backward()
    for engine, plain in ((models.actor, actor), (models.critic, critic)):
        grads = {name: p.grad for name, p in plain.named_parameters()}
        expected = [_get_grad(name, grads).flatten() for name in read_gradients(engine)]
        assert relative_error(read_flat_gradient(engine), torch.cat(expected)) < 1e-5


def _get_grad(name: str, grads: dict[str, Tensor | None]) -> Tensor:
    grad = grads[name.removeprefix("scorer.").removeprefix("model.")]
    assert grad is not None
    return grad


@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_update_does_not_depend_on_the_micro_batch_size(toy: Path, micro_batch_size: int) -> None:
    config = toy_config(toy)
    full, split = toy_models(config), toy_models(config)
    rollout = toy_rollout(full, config)
    rollout.counted[0] = False  # its tokens are excluded from the loss

    expected = run_update(full, rollout, config)
    actual = run_update(split, rollout, toy_config(toy, micro_batch_size=micro_batch_size))

    assert relative_error(read_flat_gradient(split.actor), read_flat_gradient(full.actor)) < 1e-5
    assert relative_error(read_flat_gradient(split.critic), read_flat_gradient(full.critic)) < 1e-5
    assert actual.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)
    assert actual.tokens == expected.tokens == int(rollout.experience.mask.sum())


def test_update_stops_beyond_the_target_kl(toy: Path) -> None:
    config = toy_config(toy, ppo_epochs=4, target_kl=1e-3)
    models = toy_models(config)
    rollout = toy_rollout(models, config)

    first = run_update(models, rollout, config)
    after_first = flat_weights(models.policy), flat_weights(models.value_model)
    second = run_update(models, rollout, config)

    assert not first.exceeds_kl
    assert second.exceeds_kl
    assert second.metrics["approx_kl"] > 1.5e-3
    assert torch.equal(flat_weights(models.policy), after_first[0])
    assert torch.equal(flat_weights(models.value_model), after_first[1])
    assert not any(grad.any() for grad in get_gradients(models.actor).values())


def test_ptx_adds_the_weighted_language_model_gradient(toy: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(
        "".join(f'{{"prompt": "Add {n}.", "response": "It is {n}"}}\n' for n in range(9))
    )
    plain_config = toy_config(toy)
    config = toy_config(toy, ptx_coef=0.5, ptx_data=(str(text),))
    plain, mixed, language_only = (toy_models(plain_config) for _ in range(3))
    rollout = toy_rollout(plain, plain_config)
    batches, num_targets = next(PtxStream(language_only.chat, config))
    for batch in batches:
        language_only.actor.backward(-language_only.actor(batch).logprobs.sum() / num_targets)
    language_model = torch.cat(
        [grad.flatten() for grad in get_gradients(language_only.actor).values()]
    )

    run_update(plain, rollout, plain_config)
    update = run_update(mixed, rollout, config, ptx=PtxStream(mixed.chat, config))

    expected = read_flat_gradient(plain.actor) + 0.5 * language_model
    assert relative_error(read_flat_gradient(mixed.actor), expected) < 1e-5
    assert update.metrics["ptx_loss"] > 1
    assert torch.equal(read_flat_gradient(mixed.critic), read_flat_gradient(plain.critic))


def test_clip_fractions_and_ratios_match_hand_computed_values(toy: Path) -> None:
    config = toy_config(toy, clip_high=0.5, value_clip=0.2)
    models = toy_models(config)
    rollout = toy_rollout(models, config)
    experience = rollout.experience
    shifted = replace(
        rollout,
        experience=replace(
            experience,
            logprobs=experience.logprobs - 0.3,  # the ratio is exp 0.3 = 1.35
            values=experience.values - 0.25,
        ),
        advantages=torch.ones_like(rollout.advantages),
    )

    wide = run_update(models, shifted, config).metrics
    models = toy_models(config)
    narrow = run_update(models, shifted, toy_config(toy, value_clip=None)).metrics

    assert wide["ratio_mean"] == pytest.approx(1.34986, rel=1e-4)
    assert wide["ratio_max"] == pytest.approx(1.34986, rel=1e-4)
    assert wide["approx_kl"] == pytest.approx(0.5 * 0.3**2, rel=1e-3)
    assert (wide["clip_fraction"], narrow["clip_fraction"]) == (0.0, 1.0)
    assert (wide["value_clip_fraction"], narrow["value_clip_fraction"]) == (1.0, 0.0)
    assert wide["policy_loss"] == pytest.approx(-1.34986, rel=1e-4)
    assert narrow["policy_loss"] == pytest.approx(-1.2, rel=1e-4)


def run_iteration(directory: str) -> dict[str, float]:
    """Run an iteration on this process's shard of prompts; return the global metrics."""
    config = toy_config(Path(directory), batch_size=3, micro_batch_size=2, ppo_epochs=2)
    models = toy_models(config)
    rows = list(ALL_ROWS)[rank() :: world_size()]
    prompts = [PROMPTS[row] for row in rows]
    responses = generate_responses(models, prompts, config, keys=rows)
    experience = score_responses(models, prompts, responses, config)
    score = score_to_reward(experience.score, experience.stopped, models, config)
    rollout = compute_advantages(experience, score, config, kl_coef=config.kl_coef)
    statistics = rollout_statistics(rollout)
    updates = update_policy(models, rollout, config, step=1, ema=None, ptx=None)
    return {
        **statistics,
        **updates.metrics(),
        "tokens": float(updates.tokens),
        "weights": flat_weights(models.policy).norm().item(),
    }


def test_iteration_on_two_processes_matches_one_process(toy: Path) -> None:
    expected = run_iteration(str(toy))

    first, second = run_ranks(run_iteration, str(toy))

    assert first == second
    assert first == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_ppo_increases_the_reward(toy: Path) -> None:
    """Even tokens, half of the vocabulary, are rewarded."""
    sizes = {"rollout_size": 24, "batch_size": 8, "micro_batch_size": 8}
    config = toy_config(toy, ppo_epochs=2, **sizes)
    config = replace(
        config, actor=replace(config.actor, optim=replace(config.actor.optim, lr=0.02))
    )
    models, prompts, mean_shares = toy_models(config), PROMPTS * 3, list[float]()

    for step in range(1, 15):
        keys = range(24 * step, 24 * (step + 1))
        responses = generate_responses(models, prompts, config, keys=keys)
        experience = score_responses(models, prompts, responses, config)
        shares = [sum(token % 2 == 0 for token in r.ids) / len(r.ids) for r in responses]
        rollout = compute_advantages(experience, torch.tensor(shares), config, kl_coef=0.0)
        update_policy(models, rollout, config, step=step, ema=None, ptx=None)
        mean_shares.append(sum(shares) / len(shares))

    assert mean_shares[0] < 0.6
    assert mean_shares[-1] > 0.9  # .95 here; it varies between processors
