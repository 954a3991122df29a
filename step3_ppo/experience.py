"""Responses scored by the models, their advantages, and micro-batches for updates.

Dimension names: B responses of this process, T response tokens (padded), K without padding. In an
episode of several turns, only the actor's tokens are response tokens; observations are stored only
in `Experience.sequences`, so that no sum includes them.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from evaluation.statistics import global_moments
from inference.engine.requests import Response
from pipeline.data.batches import TokenBatch, collate, pad
from pipeline.data.examples import Encoded
from pipeline.models.forward.forward import TokenLogprobs
from pipeline.models.passes import evaluating
from pipeline.parallel.device import local_device, to_device
from pipeline.parallel.mesh import current_mesh
from step3_ppo.advantages import ESTIMATORS, RewardedResponses
from step3_ppo.config import PPOConfig
from step3_ppo.losses import correction_weights, overlong_penalty, token_rewards, whiten
from step3_ppo.methods import ESTIMATOR_NEEDS
from step3_ppo.models import Models, join_response, split_micro_batches
from step3_ppo.rewards import compute_raw_scores
from step3_ppo.served_teacher import collect

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ForwardPass:
    """One pass of actor and critic over a process's entire rollout, and its autograd graph."""

    policy: TokenLogprobs
    values: Float[Tensor, " K"] | None
    """None without a critic."""

    def outputs(self) -> dict[str, Tensor]:
        """Return the models' outputs, detached."""
        assert self.policy.entropy is not None
        outputs = {
            "logprobs": self.policy.logprobs.detach(),
            "entropy": self.policy.entropy.detach(),
        }
        return outputs if self.values is None else outputs | {"values": self.values.detach()}


@dataclass(frozen=True)
class Experience:
    """Responses, and each model's outputs for them before any update."""

    sequences: list[Encoded]
    """Prompt and response; the actor's tokens are the trained ones."""

    stopped: Bool[Tensor, " B"]
    """Whether a stop token ended the response, or the environment ended the episode."""

    mask: Bool[Tensor, "B T"]
    """True on response tokens, including the end-of-turn token."""

    sampled_logprobs: Float[Tensor, "B T"]
    """log pi as computed during generation; for demonstrations, the same as `logprobs`."""

    logprobs: Float[Tensor, "B T"]
    """log pi as computed by the training engine before any update: the old policy of the ratio."""

    ref_logprobs: Float[Tensor, "B T"] | None
    """log pi_ref; None without a reference, or for gkd, whose updates run the teacher instead."""

    entropy: Float[Tensor, "B T"]
    values: Float[Tensor, "B T"] | None
    """Value of the state before each token; None without a critic."""

    score: Float[Tensor, " B"] | None
    """The reward model's raw score of the whole sequence; None without a reward model."""

    forward: ForwardPass | None = None
    """The pass through which the first update may backpropagate once."""

    @cached_property
    def mask_on_host(self) -> Bool[Tensor, "B T"]:
        """The mask, copied from the device once."""
        return self.mask.cpu()


@dataclass(frozen=True)
class MicroBatch:
    """The concatenated response tokens of some rows, with all inputs of an update."""

    tokens: TokenBatch
    mask: Bool[Tensor, "B T"]
    """The positions of the K tokens in their responses, in order."""

    old_logprobs: Float[Tensor, " K"]
    ref_logprobs: Float[Tensor, " K"] | None
    advantages: Float[Tensor, " K"]
    lengths: Float[Tensor, " K"]
    """Number of tokens in each token's response."""

    counted: Float[Tensor, " K"]
    """0 for tokens that are excluded from all losses, otherwise 1."""

    correction: Float[Tensor, " K"] | None
    """Importance weights from `step3_ppo.losses`; None without a correction."""

    kl_coef: float
    """Weight of the KL penalty in the loss."""

    old_values: Float[Tensor, " K"] | None
    returns: Float[Tensor, " K"] | None
    """Targets of the critic; None, like `old_values`, without a critic."""


@dataclass(frozen=True)
class Rollout:
    """Experience and quantities derived from it, which stay fixed over all epochs of updates."""

    experience: Experience
    reward_score: Float[Tensor, " B"]
    """Reward of each response without the KL penalty; with a teacher, the sum of token rewards."""

    rewards: Float[Tensor, "B T"]
    advantages: Float[Tensor, "B T"]
    returns: Float[Tensor, "B T"] | None
    """Targets of the critic; None without a critic."""

    counted: Bool[Tensor, " B"]
    """False for responses that are excluded from baselines and losses."""

    correction: Float[Tensor, "B T"] | None = None
    """Importance weights of the tokens; None without a correction."""

    group_size: int = 1
    """Number of responses per prompt; these are adjacent."""

    kl_coef: float = 0.0
    """Weight of the KL penalty in the loss; 0 if it is in the reward."""

    def micro_batch(self, rows: Sequence[int]) -> MicroBatch:
        """Concatenate these rows; without rows, return a micro-batch that has no gradient."""
        experience = self.experience
        device, indices = experience.mask.device, torch.tensor(list(rows) or [0])
        index = to_device(indices, device)
        mask = experience.mask[index] if rows else torch.zeros_like(experience.mask[index])
        sequences = [experience.sequences[row] for row in indices.tolist()]
        if not rows:
            sequences = [Encoded.untrained(sequences[0].input_ids)]
        lengths = mask.sum(dim=1, keepdim=True).expand_as(mask)
        # Computed on the host to avoid a device synchronization.
        host_mask = experience.mask_on_host[indices] if rows else torch.zeros(0, dtype=torch.bool)
        token_indices = to_device(host_mask.flatten().nonzero().squeeze(1), device)

        def gather_tokens(padded: Shaped[Tensor, "_B _T"]) -> Shaped[Tensor, " K"]:
            return padded.flatten()[token_indices]

        def expand_to_tokens(flags: Bool[Tensor, " B"]) -> Float[Tensor, " K"]:
            return gather_tokens(flags[index, None].expand_as(mask)).float()

        def gather_rows(values: Float[Tensor, "B T"] | None) -> Float[Tensor, " K"] | None:
            return None if values is None else gather_tokens(values[index])

        return MicroBatch(
            tokens=collate(sequences).to(local_device()),
            mask=mask,
            old_logprobs=gather_tokens(experience.logprobs[index]),
            ref_logprobs=gather_rows(experience.ref_logprobs),
            advantages=gather_tokens(self.advantages[index]),
            lengths=gather_tokens(lengths).float(),
            counted=expand_to_tokens(self.counted),
            correction=gather_rows(self.correction),
            kl_coef=self.kl_coef,
            old_values=gather_rows(experience.values),
            returns=gather_rows(self.returns),
        )


def score_responses(
    models: Models,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Response],
    config: PPOConfig,
    *,
    score: Float[Tensor, " B"] | None = None,
    step: int | None = None,
) -> Experience:
    """Run actor, reference, critic and reward model over the responses, without dropout.

    Args:
        models: all models of the step.
        prompts: token ids of the prompts.
        responses: responses to the prompts.
        config: settings of the step.
        score: the reward model's raw scores, if they are already known.
        step: the iteration whose first update may backpropagate through this pass; None if no
            update follows, in which case no graph is built.
    """
    device = local_device()
    sequences = list(map(join_response, prompts, responses))
    # Without rows, a process scores its first one again, because passes are collectives.
    parts = [rows or [0] for rows in split_micro_batches(config, sequences)]
    batches = [collate([sequences[row] for row in rows]).to(device) for rows in parts]
    read_teacher = _request_teacher(models, prompts, responses)
    # Frozen models run first, before autograd graphs occupy memory.
    results: dict[str, list[Tensor]] = {}
    if models.reference is not None and (config.method != "gkd" or step is None):
        results["ref_logprobs"] = models.reference.logprobs(batches, temperature=config.temperature)
    if score is None and models.reward is not None:
        score = compute_raw_scores(models, prompts, responses, config)
    forward: ForwardPass | None = None
    if step is not None and config.reuses_forward(processes=current_mesh().data.size):
        (batch,) = batches
        values = None if models.critic is None else models.critic(batch)
        forward = ForwardPass(_run_policy(models, batch, config), values)
        results |= {name: [output] for name, output in forward.outputs().items()}
    else:
        results |= _run_trained_models(models, batches, config)
    lengths = [len(response.ids) for response in responses]
    outputs = {name: _pad_rows(result, parts, lengths) for name, result in results.items()}
    sampled, mask = pad(list(map(_get_sampled, responses, outputs["logprobs"])))
    return Experience(
        sequences=sequences,
        stopped=torch.tensor([response.stopped for response in responses], device=device),
        mask=mask,
        sampled_logprobs=sampled,
        logprobs=outputs["logprobs"],
        ref_logprobs=outputs.get("ref_logprobs") if read_teacher is None else read_teacher(),
        entropy=outputs["entropy"],
        values=outputs.get("values"),
        score=score,
        forward=forward,
    )


def _request_teacher(
    models: Models, prompts: Sequence[Sequence[int]], responses: Sequence[Response]
) -> Callable[[], Float[Tensor, "B T"]] | None:
    """Request a served teacher's log-probabilities; the returned function waits for them."""
    if models.teacher is None:
        return None
    model_group, pending = current_mesh().model_parallel, []
    if model_group.rank == 0:  # servers' results vary, but all parts of a model need the same bits
        pending = models.teacher.submit(prompts, [response.ids for response in responses])

    def wait() -> Tensor:
        logprobs = model_group.gather_objects(collect(pending))[0]
        return pad([torch.tensor(row, device=local_device()) for row in logprobs])[0]

    return wait


def _get_sampled(response: Response, logprobs: Float[Tensor, " T"]) -> Float[Tensor, " _L"]:
    """Return log pi as computed in generation or, for a demonstration, in training."""
    if not response.logprobs:
        return logprobs[: len(response.ids)]
    return torch.tensor(response.logprobs, device=logprobs.device)


def _pad_rows(
    outputs: Sequence[Float[Tensor, " _K"]], parts: Sequence[Sequence[int]], lengths: Sequence[int]
) -> Float[Tensor, "B T"]:
    """Convert a model's outputs, (K) per micro-batch, to one padded row per response."""
    by_row = [torch.empty(0)] * len(lengths)
    for rows, output in zip(parts, outputs, strict=True):
        for row, tokens in zip(rows, output.split([lengths[row] for row in rows]), strict=True):
            by_row[row] = tokens
    return pad(by_row)[0]


def _run_trained_models(
    models: Models, batches: Sequence[TokenBatch], config: PPOConfig
) -> dict[str, list[Tensor]]:
    """Run actor and critic without dropout or autograd, and return their outputs."""

    def run_policy(batch: TokenBatch) -> Tensor:
        outputs = _run_policy(models, batch, config)
        assert outputs.entropy is not None
        return torch.stack([outputs.logprobs, outputs.entropy])

    with evaluating(models.actor.model):
        pairs = models.policy_passes.forward_everywhere(
            batches, run_policy, lambda batch: (2, batch.num_targets)
        )
    outputs = {"logprobs": [pair[0] for pair in pairs], "entropy": [pair[1] for pair in pairs]}
    if models.value_passes is None or models.critic is None:
        return outputs
    with evaluating(models.critic.model):
        values = models.value_passes.forward_everywhere(
            batches, models.critic, lambda batch: (batch.num_targets,)
        )
    return outputs | {"values": values}


def _run_policy(models: Models, batch: TokenBatch, config: PPOConfig) -> TokenLogprobs:
    return models.actor(
        batch, temperature=config.temperature, entropy=True, entropy_grad=config.entropy_coef > 0
    )


def compute_advantages(
    experience: Experience,
    reward_score: Float[Tensor, " B"],
    config: PPOConfig,
    *,
    kl_coef: float,
    counted: Bool[Tensor, " B"] | None = None,
) -> Rollout:
    """Convert the responses' rewards and KL to token rewards and advantages.

    Args:
        experience: the scored responses.
        reward_score: the reward of each response, from `step3_ppo.rewards.compute_rewards`.
        config: settings of the step.
        kl_coef: weight of the KL penalty.
        counted: False for responses without a reward; by default, all responses have one.
    """
    mask = experience.mask
    if counted is None:
        counted = torch.ones_like(experience.stopped)
    stopped = experience.stopped
    reward_score, kept = apply_overlong(reward_score, experience.sequences, stopped, config)
    counted = counted & kept
    logprobs = experience.logprobs
    reference = logprobs if experience.ref_logprobs is None else experience.ref_logprobs
    reward_kl_coef = kl_coef if config.kl_in == "reward" else 0.0
    rewards = token_rewards(reward_score, logprobs, reference, mask, kl_coef=reward_kl_coef)
    if config.is_distillation:
        reward_score = rewards.sum(dim=1)
    counted_mask = mask & counted[:, None]
    estimate = ESTIMATORS[config.advantage](
        RewardedResponses(
            rewards=rewards,
            mask=mask,
            scores=reward_score,
            values=experience.values,
            group_size=config.group_size,
            gamma=config.gamma,
            lam=config.lam,
            counted=counted,
            group_baseline=config.baseline == "group",
        )
    )
    advantages = estimate.advantages
    if config.whiten_advantages and ESTIMATOR_NEEDS[config.advantage].whitening:
        mean, variance = global_moments(advantages, counted_mask)
        advantages = whiten(advantages, mask, mean=mean, variance=variance)
    zeroed = ~counted if estimate.zeroed is None else estimate.zeroed | ~counted
    return Rollout(
        experience=experience,
        reward_score=reward_score,
        rewards=rewards,
        advantages=advantages.masked_fill(zeroed[:, None], 0.0),
        returns=estimate.returns,
        counted=counted,
        correction=_compute_correction(experience, config),
        group_size=config.group_size,
        kl_coef=kl_coef if config.kl_in == "loss" else 0.0,
    )


def apply_overlong(
    reward_score: Float[Tensor, " B"],
    sequences: Sequence[Encoded],
    stopped: Bool[Tensor, " B"],
    config: PPOConfig,
) -> tuple[Float[Tensor, " B"], Bool[Tensor, " B"]]:
    """Add DAPO's overlong penalties (section 3.4); return rewards, and whether responses count."""
    if config.overlong_buffer > 0:
        # Observations count as well, since `max_new_tokens` limits both.
        lengths = [len(sequence) - sequence.trained.index(True) for sequence in sequences]
        reward_score = reward_score + overlong_penalty(
            reward_score.new_tensor(lengths),
            limit=config.max_new_tokens,
            buffer=config.overlong_tokens,
        )
    return reward_score, stopped if config.overlong == "mask" else torch.ones_like(stopped)


def _compute_correction(experience: Experience, config: PPOConfig) -> Float[Tensor, "B T"] | None:
    """Return the importance weights of the tokens, or None if no correction is needed."""
    correction = config.correction
    if correction == "auto" and config.rollout_processes == 0:
        if rollout_gap(experience) <= config.correction_threshold:
            return None
        _log_correction_once(config.correction_threshold, config.correction_cap)
    if correction == "auto":  # rollouts of other processes are off-policy by design
        correction = "truncate"
    if correction == "none":
        return None
    return correction_weights(
        experience.logprobs,
        experience.sampled_logprobs,
        experience.mask,
        correction=correction,
        level=config.correction_level,
        cap=config.correction_cap,
    )


@cache
def _log_correction_once(threshold: float, cap: float) -> None:
    logger.info(
        "rollout_gap exceeds ppo.correction_threshold %g: correcting such rollouts with importance"
        " weights of at most %g (set ppo.correction to none to disable this)",
        threshold,
        cap,
    )


def rollout_gap(experience: Experience) -> float:
    """Return the mean absolute difference in log-probability between generation and training.

    The mean is over the response tokens of all processes, in nats.
    """
    gap = (experience.sampled_logprobs - experience.logprobs)[experience.mask].abs().double()
    total, count = current_mesh().data.sums([gap.sum().item(), gap.numel()])
    return total / max(1.0, count)


GAP_LIMITS = {True: (1e-3, 0.05), False: (0.05, 2.0)}
"""Limits on the mean gap and on any token's gap, in nats, by whether all weights are fp32."""

RATIO_LIMITS = {True: 1e-3, False: 0.5}
"""Largest deviation of a token's ratio from 1 in the first update, by the same keys."""


class OffPolicyError(RuntimeError):
    """The policy being trained differs from the one that generated the rollout."""


def check_rollout_gap(metrics: Mapping[str, float], models: Models) -> None:
    """Stop if generation's log-probabilities are not those of the weights being trained.

    Rounding causes a mean gap of up to 3e-2 nats in lower precision (extreme adapter weights merged
    into bf16) and 1e-6 in fp32. Incorrectly merged weights increase the mean gap; wrong positions
    increase the gap at some tokens. With `staleness` above 0, a gap is expected and not checked.

    Raises:
        OffPolicyError: the actor was gathered, merged or sharded incorrectly, or its model family
            gives different results in generation and training.
    """
    mean_limit, token_limit = GAP_LIMITS[_is_fp32(models)]
    gap, max_gap = metrics["rollout_gap"], metrics["rollout_gap_max"]
    if not (metrics.get("staleness") or (gap <= mean_limit and max_gap <= token_limit)):
        raise OffPolicyError(
            f"log-probabilities of generation and training differ by {gap:.2g} nats per token on"
            f" average and by up to {max_gap:.2g}, above the limits of {mean_limit} and"
            f" {token_limit}: the responses are not from the policy being trained. Please report"
            " this problem and the model's name; if ppo.inference_tp_size is above 1, set it to 1"
        )


def check_first_update(ratio_error: float, models: Models) -> None:
    """Stop if the ratio of the first minibatch, before any update, is not 1.

    The tolerance per token is 1e-3 in fp32, where only the summation order differs, and 0.5 in
    lower precision, where rounding is coarse. If the update backpropagates through the pass that
    scored the rollout, only mismatched rows change the ratio; see `check_rollout_gap`.

    Raises:
        OffPolicyError: masks, positions or precision differ between rollout and training.
    """
    limit = RATIO_LIMITS[_is_fp32(models)]
    if ratio_error > limit:
        raise OffPolicyError(
            f"the policy ratio of the first minibatch differs from 1 by {ratio_error:.2g}, above"
            f" {limit}: masks, positions or precision differ between scoring and training. Please"
            " report this problem and the model's name"
        )


def _is_fp32(models: Models) -> bool:
    # All weights, not only the trained ones: the base of fp32 adapters may be bf16.
    return all(param.dtype == torch.float32 for param in models.policy.parameters())
