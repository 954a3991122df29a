"""Responses to a batch of prompts and what the models make of them, before any update.

Dimension names: B responses of this process, T response tokens (padded), K without padding. Of an
episode of several turns the response tokens are the actor's, turn after turn; what an environment
said between them lies in `Experience.sequences` alone, so that nothing is summed over it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from inference.engine.sampling import Sampler
from inference.generation import Response, generate_each
from pipeline.data.batches import TokenBatch, collate, local_micro_batches, pad
from pipeline.data.examples import Encoded
from pipeline.models.forward import TokenLogprobs
from pipeline.models.trained import evaluating
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from step3_ppo.advantages import ESTIMATORS, Estimate, Rewarded
from step3_ppo.config import PPOConfig
from step3_ppo.correction import correction_weights
from step3_ppo.episodes import whole_sequence
from step3_ppo.losses import overlong_penalty, token_rewards, whiten
from step3_ppo.models import Models
from step3_ppo.needs import ESTIMATOR_NEEDS
from step3_ppo.scoring import raw_scores


@dataclass(frozen=True)
class Forward:
    """One pass of actor and critic over a process's whole rollout, with the graph to go back."""

    policy: TokenLogprobs
    values: Float[Tensor, " K"] | None
    """None without a critic."""

    def outputs(self) -> dict[str, Tensor]:
        """Those of the models, without graphs."""
        assert self.policy.entropy is not None
        outputs = {
            "logprobs": self.policy.logprobs.detach(),
            "entropy": self.policy.entropy.detach(),
        }
        return outputs if self.values is None else outputs | {"values": self.values.detach()}


@dataclass(frozen=True)
class Experience:
    """Responses as the models saw them when they were sampled."""

    sequences: list[Encoded]
    """Prompt and response; the actor's tokens are the trained ones."""

    stopped: Bool[Tensor, " B"]
    """Whether the response ended by itself."""

    mask: Bool[Tensor, "B T"]
    """True on response tokens, the end-of-turn token included."""

    sampled_logprobs: Float[Tensor, "B T"]
    """log pi as generation computed it."""

    logprobs: Float[Tensor, "B T"]
    """log pi as training computes it, before any update: the old policy of the ratio."""

    ref_logprobs: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"]
    values: Float[Tensor, "B T"] | None
    """Value of the state before each token; None without a critic."""

    score: Float[Tensor, " B"] | None
    """The reward model's raw score of the whole sequence; None without a reward model."""

    forward: Forward | None = None
    """What the first update can go back through, once."""


@dataclass(frozen=True)
class Minibatch:
    """Response tokens of some rows, in one piece: everything an update needs."""

    tokens: TokenBatch
    mask: Bool[Tensor, "B T"]
    """Where the K tokens are, in this order, in their responses."""

    old_logprobs: Float[Tensor, " K"]
    ref_logprobs: Float[Tensor, " K"]
    advantages: Float[Tensor, " K"]
    lengths: Float[Tensor, " K"]
    """Of each token: the tokens of its response."""

    counted: Float[Tensor, " K"]
    """0 for tokens that no loss has, else 1."""

    positive: Float[Tensor, " K"]
    """1 for tokens of responses with a reward above 0, else 0."""

    correction: Float[Tensor, " K"] | None
    """Of `step3_ppo.correction`; None weighs all alike."""

    kl_coef: float
    """Weight of the KL penalty in the loss."""

    old_values: Float[Tensor, " K"] | None
    returns: Float[Tensor, " K"] | None
    """What the critic learns; both are None without a critic."""


@dataclass(frozen=True)
class Rollout:
    """Experience with what is derived from it; fixed over all epochs of updates."""

    experience: Experience
    reward_score: Float[Tensor, " B"]
    """What each response is worth, as it counts in the reward."""

    rewards: Float[Tensor, "B T"]
    advantages: Float[Tensor, "B T"]
    returns: Float[Tensor, "B T"] | None
    """What the critic learns; None without a critic."""

    counted: Bool[Tensor, " B"]
    """False for responses that neither a baseline nor a loss has."""

    correction: Float[Tensor, "B T"] | None = None
    """What each token weighs where generation's policy is not training's; None weighs all alike."""

    group_size: int = 1
    """Responses to each prompt, which are neighbours."""

    kl_coef: float = 0.0
    """Weight of the KL penalty in the loss; 0 where it is in the reward."""

    def minibatch(self, rows: Sequence[int]) -> Minibatch:
        """The rows laid end to end; without rows, one that teaches nothing."""
        experience = self.experience
        index = torch.tensor(list(rows) or [0], device=experience.mask.device)
        mask = experience.mask[index] if rows else torch.zeros_like(experience.mask[index])
        sequences = [experience.sequences[row] for row in index.tolist()]
        if not rows:
            sequences = [Encoded.untrained(sequences[0].input_ids)]
        lengths = mask.sum(dim=1, keepdim=True).expand_as(mask)

        def tokens_of(padded: Float[Tensor, "B T"] | None) -> Float[Tensor, " K"] | None:
            return None if padded is None else padded[index][mask]

        def of_response(flags: Bool[Tensor, " B"]) -> Float[Tensor, " K"]:
            return flags[index, None].expand_as(mask)[mask].float()

        return Minibatch(
            tokens=collate(sequences).to(local_device()),
            mask=mask,
            old_logprobs=experience.logprobs[index][mask],
            ref_logprobs=experience.ref_logprobs[index][mask],
            advantages=self.advantages[index][mask],
            lengths=lengths[mask].float(),
            counted=of_response(self.counted),
            positive=of_response(self.counted & (self.reward_score > 0)),
            correction=tokens_of(self.correction),
            kl_coef=self.kl_coef,
            old_values=tokens_of(experience.values),
            returns=tokens_of(self.returns),
        )


def generate_responses(
    models: Models,
    prompts: Sequence[Sequence[int]],
    config: PPOConfig,
    *,
    keys: Sequence[int],
    on_response: Callable[[int, Response], None] | None = None,
) -> list[Response]:
    """The actor's answers, sampled by `keys`, which no other rollout of the run uses.

    `on_response` is called with (number of the prompt, response) as they end.
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
        learns: whether an update follows at all, which may go back through this pass; without one
            no graph is made.
    """
    sequences = list(map(whole_sequence, prompts, responses))
    outputs: dict[str, list[Tensor]] = defaultdict(lambda: [torch.empty(0)] * len(sequences))
    reuses = learns and config.reuses_forward(processes=current_mesh().data.size)
    kept: Forward | None = None
    max_tokens = config.micro_batch_size * config.max_length
    for part in local_micro_batches([len(row) for row in sequences], max_tokens=max_tokens):
        rows = part or [0]
        batch = collate([sequences[row] for row in rows]).to(local_device())
        found = _of_frozen(models, batch, config)  # before there are graphs in memory
        with nullcontext() if reuses else _without_graphs(models):
            forward = _forward(models, batch, config, train_actor=train_actor)
        found |= forward.outputs()
        kept = forward if reuses else None
        lengths = [len(responses[row].ids) for row in rows]
        for name, output in found.items():
            pieces = output.split(lengths) if name != "score" else output.unbind()
            for row, piece in zip(rows, pieces, strict=True):
                outputs[name][row] = piece
    device = local_device()
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


def _of_frozen(models: Models, batch: TokenBatch, config: PPOConfig) -> dict[str, Tensor]:
    found = {"ref_logprobs": models.reference.logprobs(batch, temperature=config.temperature)}
    if models.reward is None or models.reward.text is not None:
        return found
    return found | {"score": models.reward.scores(batch)}


def _forward(models: Models, batch: TokenBatch, config: PPOConfig, *, train_actor: bool) -> Forward:
    with torch.set_grad_enabled(torch.is_grad_enabled() and train_actor):
        policy = models.actor(
            batch,
            temperature=config.temperature,
            entropy=True,
            entropy_learns=config.entropy_coef > 0,
        )
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
        reward_score: what each is worth, as `step3_ppo.response_rewards.rewards_of` has it.
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
