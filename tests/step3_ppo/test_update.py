"""PPO's updates: ratio 1 at first, gradients as the formulas say, nothing changed that must not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from step3_ppo.experience import compute_advantages, score_responses
from step3_ppo.metrics import critic_statistics, rollout_statistics
from step3_ppo.rewards import ResponseRewards, compute_reward
from step3_ppo.rollout import generate_responses
from step3_ppo.update import PtxStream, fit_values, update_policy
from tests.distributed import rank, run_ranks, world_size
from tests.pipeline.engine.inspection import get_gradients
from tests.step3_ppo.toy import (
    ALL,
    PROMPTS,
    distance,
    gradient,
    gradients,
    toy_config,
    toy_models,
    toy_rollout,
    updated,
    weights,
)


def test_the_first_minibatch_has_a_ratio_of_exactly_1_where_the_shapes_are_the_same(
    toy: Path,
) -> None:
    config = toy_config(toy)
    models = toy_models(config)

    metrics = updated(models, toy_rollout(models, config), config).metrics

    assert metrics["ratio_max"] == metrics["ratio_mean"] == 1.0
    assert metrics["approx_kl"] == metrics["clip_fraction"] == 0.0
    assert metrics["value_clip_fraction"] == 0.0


def test_the_critic_alone_is_fitted_to_the_first_rollout(toy: Path) -> None:
    config = toy_config(toy)
    models = toy_models(config)
    before, actor = toy_rollout(models, config), weights(models.actor.model)
    rewards = ResponseRewards(before.reward_score, before.reward_score)

    fit_values(models, before.experience, rewards, config, kl_coef=config.kl_coef)

    assert distance(weights(models.actor.model), actor) == 0
    assert critic_statistics(before)["explained_variance"] < 0
    assert critic_statistics(toy_rollout(models, config))["explained_variance"] > 0


def test_gradients_are_those_of_the_formulas_one_sequence_at_a_time(toy: Path) -> None:
    """At ratio 1 the actor's is -A grad log pi, the critic's (V - R) grad V, over all tokens."""
    config = toy_config(toy, entropy_coef=0.1)
    models = toy_models(config)
    rollout = toy_rollout(models, config)
    actor = AutoModelForCausalLM.from_pretrained(toy / "actor")
    critic = AutoModelForSequenceClassification.from_pretrained(toy / "reward")
    num_tokens = int(rollout.experience.mask.sum())

    updated(models, rollout, config)

    for row, sequence in enumerate(rollout.experience.sequences):
        ids = torch.tensor([sequence.input_ids])
        length = sum(sequence.trained)
        before = slice(ids.shape[1] - length - 1, ids.shape[1] - 1)
        policy = torch.distributions.Categorical(logits=actor(ids).logits[0, before])
        logprobs = policy.log_prob(ids[0, -length:])
        objective = rollout.advantages[row, :length] @ logprobs + 0.1 * policy.entropy().sum()
        (-objective / num_tokens).backward()
        hidden = critic.model(ids).last_hidden_state[0, before]
        values = (hidden @ critic.score.weight[0] - 0.5) / 2.0
        (0.5 * (values - rollout.returns[row, :length]).square().sum() / num_tokens).backward()
    for engine, plain in ((models.actor, actor), (models.critic, critic)):
        grads = {name: p.grad for name, p in plain.named_parameters()}
        expected = [_get_grad(name, grads).flatten() for name in gradients(engine)]
        assert distance(gradient(engine), torch.cat(expected)) < 1e-5


def _get_grad(name: str, grads: dict[str, Tensor | None]) -> Tensor:
    found = grads[name.removeprefix("scorer.").removeprefix("model.")]
    assert found is not None
    return found


@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_an_update_does_not_depend_on_the_micro_batch_size(
    toy: Path, micro_batch_size: int
) -> None:
    config = toy_config(toy)
    whole, cut = toy_models(config), toy_models(config)
    rollout = toy_rollout(whole, config)
    rollout.counted[0] = False  # its tokens are excluded from the loss

    expected = updated(whole, rollout, config)
    got = updated(cut, rollout, toy_config(toy, micro_batch_size=micro_batch_size))

    assert distance(gradient(cut.actor), gradient(whole.actor)) < 1e-5
    assert distance(gradient(cut.critic), gradient(whole.critic)) < 1e-5
    assert got.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)
    assert got.tokens == expected.tokens == int(rollout.experience.mask.sum())


def test_a_policy_too_far_from_the_old_one_stops_and_changes_nothing_more(toy: Path) -> None:
    config = toy_config(toy, ppo_epochs=4, target_kl=1e-3)
    models = toy_models(config)
    rollout = toy_rollout(models, config)

    first = updated(models, rollout, config)
    after_one = weights(models.policy), weights(models.value_model)
    second = updated(models, rollout, config)

    assert not first.stopped
    assert second.stopped
    assert second.metrics["approx_kl"] > 1.5e-3
    assert torch.equal(weights(models.policy), after_one[0])
    assert torch.equal(weights(models.value_model), after_one[1])
    assert not any(each.any() for each in get_gradients(models.actor).values())


def test_ptx_adds_its_share_of_a_language_models_gradient(toy: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(
        "".join(f'{{"prompt": "Add {n}.", "response": "It is {n}"}}\n' for n in range(9))
    )
    plain_config = toy_config(toy)
    config = toy_config(toy, ptx_coef=0.5, ptx_data=(str(text),))
    plain, mixed, alone = (toy_models(plain_config) for _ in range(3))
    rollout = toy_rollout(plain, plain_config)
    batches, num_targets = next(PtxStream(alone.chat, config))
    for batch in batches:
        alone.actor.backward(-alone.actor(batch).logprobs.sum() / num_targets)
    language_model = torch.cat([each.flatten() for each in get_gradients(alone.actor).values()])

    updated(plain, rollout, plain_config)
    update = updated(mixed, rollout, config, ptx=PtxStream(mixed.chat, config))

    expected = gradient(plain.actor) + 0.5 * language_model
    assert distance(gradient(mixed.actor), expected) < 1e-5
    assert update.metrics["ptx_loss"] > 1
    assert torch.equal(gradient(mixed.critic), gradient(plain.critic))


def test_clip_fractions_and_ratios_by_hand(toy: Path) -> None:
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

    wide = updated(models, shifted, config).metrics
    models = toy_models(config)
    narrow = updated(models, shifted, toy_config(toy, value_clip=None)).metrics

    assert wide["ratio_mean"] == pytest.approx(1.34986, rel=1e-4)
    assert wide["ratio_max"] == pytest.approx(1.34986, rel=1e-4)
    assert wide["approx_kl"] == pytest.approx(0.5 * 0.3**2, rel=1e-3)
    assert (wide["clip_fraction"], narrow["clip_fraction"]) == (0.0, 1.0)
    assert (wide["value_clip_fraction"], narrow["value_clip_fraction"]) == (1.0, 0.0)
    assert wide["policy_loss"] == pytest.approx(-1.34986, rel=1e-4)
    assert narrow["policy_loss"] == pytest.approx(-1.2, rel=1e-4)


def iteration(directory: str) -> dict[str, float]:
    """One iteration on this process's share of the prompts; its metrics, which all agree on."""
    config = toy_config(Path(directory), batch_size=3, micro_batch_size=2, ppo_epochs=2)
    models = toy_models(config)
    rows = list(ALL)[rank() :: world_size()]
    prompts = [PROMPTS[row] for row in rows]
    responses = generate_responses(models, prompts, config, keys=rows)
    experience = score_responses(models, prompts, responses, config)
    score = compute_reward(experience.score, experience.stopped, models, config)
    rollout = compute_advantages(experience, score, config, kl_coef=config.kl_coef)
    statistics = rollout_statistics(rollout)
    updates = update_policy(models, rollout, config, step=1, ema=None, ptx=None)
    return {
        **statistics,
        **updates.metrics(),
        "tokens": float(updates.tokens),
        "weights": weights(models.policy).norm().item(),
    }


def test_an_iteration_on_two_processes_is_the_one_on_a_single_process(toy: Path) -> None:
    alone = iteration(str(toy))

    first, second = run_ranks(iteration, str(toy))

    assert first == second
    assert first == pytest.approx(alone, rel=1e-3, abs=1e-4)


def test_ppo_learns_what_is_rewarded(toy: Path) -> None:
    """Even tokens, half of the vocabulary, are rewarded."""
    sizes = {"rollout_size": 24, "batch_size": 8, "micro_batch_size": 8}
    config = toy_config(toy, ppo_epochs=2, **sizes)
    config = replace(
        config, actor=replace(config.actor, optim=replace(config.actor.optim, lr=0.02))
    )
    models, prompts, even = toy_models(config), PROMPTS * 3, list[float]()

    for step in range(1, 15):
        keys = range(24 * step, 24 * (step + 1))
        responses = generate_responses(models, prompts, config, keys=keys)
        experience = score_responses(models, prompts, responses, config)
        shares = [sum(token % 2 == 0 for token in r.ids) / len(r.ids) for r in responses]
        rollout = compute_advantages(experience, torch.tensor(shares), config, kl_coef=0.0)
        update_policy(models, rollout, config, step=step, ema=None, ptx=None)
        even.append(sum(shares) / len(shares))

    assert even[0] < 0.6
    assert even[-1] > 0.9  # .95 here; which rows rise first differs from processor to processor
