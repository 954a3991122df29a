"""Responses to a batch of prompts, scored by the models, before any update.

Dimension names: B responses of this process, T response tokens (padded), K without padding. Of an
episode of several turns the response tokens are the actor's, turn after turn; what an environment
said between them is in `Experience.sequences` alone, so that no sum includes it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from inference.engine.sampling import Sampler
from inference.generation import Response, generate_each
from pipeline.data.batches import TokenBatch, collate, pad
from pipeline.models.forward import TokenLogprobs
from pipeline.models.trained import evaluating
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from step3_ppo.advantages import ESTIMATORS, Estimate, Rewarded
from step3_ppo.config import PPOConfig
from step3_ppo.correction import correction_weights
from step3_ppo.episodes import whole_sequence
from step3_ppo.experience import Experience, Forward, Rollout, own_micro_batches
from step3_ppo.losses import overlong_penalty, token_rewards, whiten
from step3_ppo.models import Models
from step3_ppo.needs import ESTIMATOR_NEEDS
from step3_ppo.scoring import raw_scores


def generate_responses(
    models: Models,
    prompts: Sequence[Sequence[int]],
    config: PPOConfig,
    *,
    keys: Sequence[int],
    on_response: Callable[[int, Response], None] | None = None,
) -> list[Response]:
    """The actor's responses, sampled with `keys`, which no other rollout of the run uses.

    `on_response` is called with (index of the prompt, response) as each one ends.
    """
    sampler = Sampler(
        temperature=config.temperature,
        top_p=1.0,
        seed=config.seed,
        stop_ids=tuple(models.chat.stop_ids),
    )
    responses: dict[int, Response] = {}
    with models.hybrid_engine.generating() as actor:
        for ended in generate_each(
            actor,
            prompts,
            sampler,
            max_new_tokens=config.max_new_tokens,
            keys=keys,
            batch_size=config.generation_batch_size,
        ):
            responses[ended.index] = ended.response
            if on_response is not None:
                on_response(ended.index, ended.response)
    return [responses[index] for index in range(len(prompts))]


def score_responses(
    models: Models,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Response],
    config: PPOConfig,
    *,
    train_actor: bool = True,
    learns: bool = True,
) -> Experience:
    """Run actor, reference, critic and reward model over the responses, without dropout.

    Args:
        models: all of the step.
        prompts: token ids.
        responses: to them.
        config: settings of the step.
        train_actor: whether the first update will train the actor beside the critic.
        learns: whether an update follows at all, which may backpropagate through this pass; without
            one no graph is made.
    """
    device = local_device()
    sequences = list(map(whole_sequence, prompts, responses))
    parts = [part or [0] for part in own_micro_batches(config, [len(row) for row in sequences])]
    batches = [collate([sequences[row] for row in rows]).to(device) for rows in parts]
    found = _of_frozen(models, batches, config)  # before there are graphs in memory
    kept: Forward | None = None
    if learns and config.reuses_forward(processes=current_mesh().data.size):
        (batch,) = batches
        kept = _forward(models, batch, config, train_actor=train_actor)
        found |= {name: [output] for name, output in kept.outputs().items()}
    else:
        with _without_graphs(models):
            found |= _of_trained(models, batches, config)
    outputs: dict[str, list[Tensor]] = defaultdict(lambda: [torch.empty(0)] * len(sequences))
    for name, each in found.items():
        for rows, output in zip(parts, each, strict=True):
            lengths = [len(responses[row].ids) for row in rows]
            pieces = output.split(lengths) if name != "score" else output.unbind()
            for row, piece in zip(rows, pieces, strict=True):
                outputs[name][row] = piece
    if models.reward is not None and models.reward.text is not None:
        outputs["score"] = list(raw_scores(models, prompts, responses, config))
    sampled, mask = pad([torch.tensor(response.logprobs, device=device) for response in responses])
    return Experience(
        sequences=sequences,
        stopped=torch.tensor([response.stopped for response in responses], device=device),
        mask=mask,
        sampled_logprobs=sampled,
        logprobs=pad(outputs["logprobs"])[0],
        ref_logprobs=pad(outputs["ref_logprobs"])[0],
        entropy=pad(outputs["entropy"])[0],
        values=pad(outputs["values"])[0] if "values" in outputs else None,
        score=torch.stack(outputs["score"]) if "score" in outputs else None,
        forward=kept,
    )


def _of_frozen(
    models: Models, batches: Sequence[TokenBatch], config: PPOConfig
) -> dict[str, list[Tensor]]:
    found = {"ref_logprobs": models.reference.logprobs(batches, temperature=config.temperature)}
    if models.reward is None or models.reward.text is not None:
        return found
    return found | {"score": models.reward.scores(batches)}


def _of_trained(
    models: Models, batches: Sequence[TokenBatch], config: PPOConfig
) -> dict[str, list[Tensor]]:
    """What actor and critic say, without graphs."""

    def policy(batch: TokenBatch) -> Tensor:
        outputs = _policy(models, batch, config)
        assert outputs.entropy is not None
        return torch.stack([outputs.logprobs, outputs.entropy])

    both = models.policy_passes.forward_everywhere(
        batches, policy, lambda batch: (2, batch.num_targets)
    )
    found = {"logprobs": [each[0] for each in both], "entropy": [each[1] for each in both]}
    if models.value_passes is None or models.critic is None:
        return found
    values = models.value_passes.forward_everywhere(
        batches, models.critic, lambda batch: (batch.num_targets,)
    )
    return found | {"values": values}


def _policy(models: Models, batch: TokenBatch, config: PPOConfig) -> TokenLogprobs:
    return models.actor(
        batch,
        temperature=config.temperature,
        entropy=True,
        entropy_learns=config.entropy_coef > 0,
    )


def _forward(models: Models, batch: TokenBatch, config: PPOConfig, *, train_actor: bool) -> Forward:
    with torch.set_grad_enabled(torch.is_grad_enabled() and train_actor):
        policy = _policy(models, batch, config)
    return Forward(policy, None if models.critic is None else models.critic(batch))


@contextmanager
def _without_graphs(models: Models) -> Iterator[None]:
    with ExitStack() as stack:
        for engine in models.trained.values():
            stack.enter_context(evaluating(engine.model))
        yield


def compute_advantages(
    experience: Experience,
    reward_score: Float[Tensor, " B"],
    config: PPOConfig,
    *,
    kl_coef: float,
    counted: Bool[Tensor, " B"] | None = None,
) -> Rollout:
    """Turn the responses' rewards and their KL into token rewards and advantages.

    Args:
        experience: the responses as the models saw them.
        reward_score: the reward of each, from `step3_ppo.response_rewards.rewards_of`.
        config: settings of the step.
        kl_coef: weight of the KL penalty.
        counted: False for responses that have no reward; all have one if not given.
    """
    mask = experience.mask
    if counted is None:
        counted = torch.ones_like(experience.stopped)
    reward_score, ends = with_overlong(reward_score, mask.sum(dim=1), experience.stopped, config)
    counted = counted & ends
    rewards = token_rewards(
        reward_score,
        experience.logprobs,
        experience.ref_logprobs,
        mask,
        kl_coef=kl_coef if config.kl_in == "reward" else 0.0,
    )
    counted_mask = mask & counted[:, None]
    if config.whiten_rewards:
        mean, variance = global_moments(rewards, counted_mask)
        rewards = whiten(rewards, mask, mean=mean, variance=variance, shift_mean=False)
    estimate = _estimate(experience, reward_score, rewards, counted, config)
    advantages = estimate.advantages
    if config.whiten_advantages and ESTIMATOR_NEEDS[config.advantage].whitening:
        mean, variance = global_moments(advantages, counted_mask)
        advantages = whiten(advantages, mask, mean=mean, variance=variance, shift_mean=True)
    silent = ~counted if estimate.silent is None else estimate.silent | ~counted
    return Rollout(
        experience,
        reward_score,
        rewards,
        advantages.masked_fill(silent[:, None], 0.0),
        estimate.returns,
        counted,
        correction=_correction(experience, config),
        group_size=config.group_size,
        kl_coef=kl_coef if config.kl_in == "loss" else 0.0,
    )


def with_overlong(
    reward_score: Float[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    stopped: Bool[Tensor, " B"],
    config: PPOConfig,
) -> tuple[Float[Tensor, " B"], Bool[Tensor, " B"]]:
    """Rewards less what long responses lose, and which responses count (Yu et al. 2025, 3.4)."""
    if config.overlong_buffer > 0:
        penalty = overlong_penalty(
            lengths.to(reward_score.dtype),
            limit=config.max_new_tokens,
            buffer=config.overlong_tokens,
        )
        reward_score = reward_score + penalty
    return reward_score, stopped if config.overlong == "mask" else torch.ones_like(stopped)


def _correction(experience: Experience, config: PPOConfig) -> Float[Tensor, "B T"] | None:
    if config.correction == "none":
        return None
    return correction_weights(
        experience.logprobs,
        experience.sampled_logprobs,
        experience.mask,
        correction=config.correction,
        level=config.correction_level,
        cap=config.correction_cap,
    )


def _estimate(
    experience: Experience,
    reward_score: Float[Tensor, " B"],
    rewards: Float[Tensor, "B T"],
    counted: Bool[Tensor, " B"],
    config: PPOConfig,
) -> Estimate:
    rewarded = Rewarded(
        rewards=rewards,
        mask=experience.mask,
        scores=reward_score,
        values=experience.values,
        group_size=config.group_size,
        gamma=config.gamma,
        lam=config.lam,
        counted=counted,
        lam_value=config.lam_value,
        lam_length_alpha=config.lam_length_alpha,
        group_baseline=config.baseline == "group",
    )
    return ESTIMATORS[config.advantage](rewarded)


def global_moments(values: Tensor, mask: Bool[Tensor, "B T"]) -> tuple[float, float]:
    """Mean and biased variance over the real tokens of all processes."""
    real = values[mask].double()
    total, count = current_mesh().data.sums([real.sum().item(), real.numel()])
    mean = total / max(1.0, count)
    (squares,) = current_mesh().data.sums([(real - mean).square().sum().item()])
    return mean, squares / max(1.0, count)
