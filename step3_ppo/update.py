"""The updates of actor and critic on one rollout."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evaluation.statistics import global_moments
from pipeline.data.batches import RowStream, TokenBatch, collate_or_empty, micro_batches
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.sharing.prompts import PromptRecord
from pipeline.data.sharing.steps import load_examples, record_prompts
from pipeline.engine.engine import Engine
from pipeline.models.forward.forward import TokenLogprobs
from pipeline.models.passes import evaluating
from pipeline.parallel.device import local_device, read_scalars, to_device
from pipeline.parallel.mesh import current_mesh
from step3_ppo.config import PPOConfig
from step3_ppo.divergence import Logits, gkd_loss
from step3_ppo.experience import (
    Experience,
    ForwardPass,
    MicroBatch,
    Rollout,
    check_first_update,
    compute_advantages,
)
from step3_ppo.losses import KL_LOSSES, LOSSES, TrustRegion, Weighting, policy_ratio, value_loss
from step3_ppo.models import Models, split_micro_batches
from step3_ppo.rewards import ResponseRewards


class Ema:
    """Averages the fp32 master weights: average = decay * average + (1 - decay) * master.

    Each process averages its own shard.
    """

    def __init__(self, engine: Engine, *, decay: float) -> None:
        self.engine = engine
        self.decay = decay
        self.weights = [master.clone() for master in engine.masters()]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average toward the current weights."""
        for average, master in zip(self.weights, self.engine.masters(), strict=True):
            average.lerp_(master, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the averaged weights in this context; restore the current ones exactly on exit."""
        current = [master.clone() for master in self.engine.masters()]
        try:
            self.engine.load_masters(self.weights)
            yield
        finally:
            self.engine.load_masters(current)


def open_ptx(chat: ChatFormat, config: PPOConfig, prompts: PromptRecord) -> "PtxStream | None":
    """Return the batches of PPO-ptx, or None if `ptx_coef` is 0; record the prompts of this step.

    Args:
        chat: the chat format for dialogues.
        config: settings of the step.
        prompts: the prompts that PPO and earlier steps train on or hold out.
    """
    ptx = PtxStream(chat, config, prompts) if config.ptx_coef > 0 else None
    record_prompts(prompts | ptx.trained if ptx else prompts, config)
    return ptx


class PtxStream:
    """Batches of dialogues or plain text, as large as PPO's minibatches.

    Rows longer than `config.data.max_length`, which must fit the actor's context, are truncated.
    """

    def __init__(
        self, chat: ChatFormat, config: PPOConfig, record: PromptRecord | None = None
    ) -> None:
        """Load the rows, except those whose prompts earlier steps or PPO hold out (`record`)."""
        self.chat = chat
        self.config = config
        data_config = config.ptx_rows or config.data
        held_out = PromptRecord(held_out=(record or PromptRecord()).held_out)
        data = load_examples(data_config, step=1, seed=config.seed, earlier=held_out)
        self.examples = data.train
        self.trained = PromptRecord(trained=data.prompts.trained)
        self.rows = RowStream(
            num_rows=len(self.examples), batch_size=config.batch_size, seed=config.seed
        )

    def state_dict(self) -> dict[str, int]:
        """Return the stream's position."""
        return self.rows.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a saved position."""
        self.rows.load_state_dict(state)

    def __next__(self) -> tuple[list[TokenBatch], int]:
        """Return this process's micro-batches, and the number of targets on all processes."""
        data = self.config.data
        encoded = [
            self.chat.encode(
                example.prompt, example.chosen, data.train_on, origin=example.origin
            ).head(data.max_length)
            for example in (self.examples[row] for row in next(self.rows))
        ]
        group = current_mesh().data
        parts = micro_batches(
            [len(row) for row in encoded],
            max_tokens=self.config.micro_batch_size * data.max_length,
            num_processes=group.size,
            process=group.rank,
        )
        batches = [
            collate_or_empty([encoded[row] for row in part], filler=encoded[0]).to(local_device())
            for part in parts
        ]
        return batches, max(1, sum(row.num_targets for row in encoded))


@dataclass(frozen=True)
class Update:
    """The result of one minibatch, over all processes."""

    metrics: dict[str, float]
    tokens: int
    """All response tokens, including those excluded from the loss."""
    exceeds_kl: bool
    """Whether no update was made because the new policy was too far from the old one."""


class Updates(list[Update]):
    """All updates of one rollout."""

    @property
    def tokens(self) -> int:
        """Number of response tokens in all minibatches."""
        return sum(update.tokens for update in self)

    def metrics(self) -> dict[str, float]:
        """Return the means of most metrics over the updates, and the number of updates made."""
        history: dict[str, list[float]] = {}
        for update in self:
            for name, value in update.metrics.items():
                history.setdefault(name, []).append(value)
        values = {name: sum(numbers) / len(numbers) for name, numbers in sorted(history.items())}
        values["ratio_max"] = max(history["ratio_max"])
        values["ratio_error"] = history["ratio_error"][0]  # first update: 0 except for rounding
        values |= {name: history[name][-1] for name in ("lr", "critic_lr") if name in history}
        values["updates"] = float(sum(not update.exceeds_kl for update in self))
        return values


def update_policy(
    models: Models,
    rollout: Rollout,
    config: PPOConfig,
    *,
    step: int,
    forward: ForwardPass | None = None,
    ema: Ema | None = None,
    ptx: PtxStream | None = None,
) -> Updates:
    """Update actor and critic over the epochs and minibatches of one rollout.

    Minibatches depend only on (seed, step, epoch) and are the same for any number of processes.
    `forward` is the scoring pass, if the first minibatch may backpropagate through it.
    """
    updates = Updates()
    for epoch in range(config.ppo_epochs):
        for rows in local_minibatches(config, step=step, epoch=epoch):
            update = update_minibatch(
                models,
                rollout,
                rows,
                config,
                ptx=ptx,
                forward=None if updates else forward,
            )
            updates.append(update)
            if step == 1 and len(updates) == 1:
                check_first_update(update.metrics["ratio_error"], models)
            if update.exceeds_kl:
                return updates
            if ema is not None:
                ema.update()
    return updates


MIN_CORRELATION = 0.5
"""Minimum standard deviation of the fitted values, relative to that of the returns."""


def fit_values(
    experience: Experience, rewards: ResponseRewards, config: PPOConfig, *, kl_coef: float
) -> tuple[float, float]:
    """Return the slope and intercept of a line that predicts returns from the critic's values.

    A reward model is not trained to score intermediate tokens, so a constant predicts returns
    better than its scores do (Yuan et al. 2025, arXiv:2503.01491). The line is fitted by least
    squares, but its slope is at least that of a correlation of `MIN_CORRELATION`, since the critic
    learns slowly with a small slope. If all values or all returns are equal, the slope is 1. The
    returns are computed with lambda 1, so they don't depend on the critic.
    """
    rollout = compute_advantages(
        experience, rewards.reward, replace(config, lam=1.0), kl_coef=kl_coef, counted=rewards.known
    )
    assert experience.values is not None
    assert rollout.returns is not None
    mask = experience.mask & rollout.counted[:, None]
    mean_x, variance_x = global_moments(experience.values, mask)
    mean_y, variance_y = global_moments(rollout.returns, mask)
    products = (experience.values - mean_x) * (rollout.returns - mean_y)
    slope = 1.0
    if variance_x > 1e-10 * mean_x**2 and variance_y > 1e-10 * mean_y**2:  # more than rounding
        smallest = MIN_CORRELATION * math.sqrt(variance_y / variance_x)
        slope = max(global_moments(products, mask)[0] / variance_x, smallest)
    return slope, mean_y - slope * mean_x


def local_minibatches(config: PPOConfig, *, step: int, epoch: int) -> Iterator[list[int]]:
    """Yield this process's rows of each minibatch in an epoch over a rollout.

    Groups are assigned round-robin: with groups of G rows and W data-parallel processes, row r of
    the rollout is in local group r // G // W of process r // G % W.
    """
    seed = config.seed * 1_000_003 + step * config.ppo_epochs + epoch
    order = torch.randperm(config.rollout_size, generator=torch.Generator().manual_seed(seed))
    data, size = current_mesh().data, config.group_size
    for minibatch in order.split(config.batch_size):
        # Sorted, so that a minibatch of all responses keeps the order of the scoring pass.
        pairs = (divmod(row, size) for row in sorted(minibatch.tolist()))
        yield [g // data.size * size + i for g, i in pairs if g % data.size == data.rank]


def update_minibatch(
    models: Models,
    rollout: Rollout,
    rows: Sequence[int],
    config: PPOConfig,
    *,
    ptx: PtxStream | None,
    forward: ForwardPass | None = None,
) -> Update:
    """Take an optimizer step with each trained model on this process's `rows` of a minibatch.

    A token's weight does not depend on its process or micro-batch. `forward` is the scoring pass
    over these rows, if the models have not changed since. With `target_kl`, no step is taken if the
    minibatch's approximate KL to the old policy exceeds 1.5 times the target; `exceeds_kl` of the
    result is then True.
    """
    weighting, tokens = _get_weights(rollout, rows, config)
    batches = _split_rows(rollout, rows, config)
    local = _backward_policy(models, batches, config, weighting, forward=forward)
    if models.critic is not None:
        critic_metrics = _backward_values(models, batches, config, weighting, forward=forward)
        local = [actor | critic for actor, critic in zip(local, critic_metrics, strict=True)]
    metrics = _reduce_metrics(local, models, num_tokens=weighting.num_tokens)
    metrics |= models.policy_passes.metrics()
    exceeds_kl = config.target_kl is not None and metrics["approx_kl"] > 1.5 * config.target_kl
    if exceeds_kl:
        for engine in models.trained.values():
            engine.discard()
        return Update(metrics, tokens, exceeds_kl=True)

    metrics["skipped"] = 0.0
    if models.critic is not None:
        result = models.critic.step()
        metrics |= {"critic_grad_norm": result.grad_norm, "critic_lr": result.lr}
        metrics["skipped"] += float(result.skipped)
    if ptx is not None:
        metrics["ptx_loss"] = _backward_ptx(models, ptx, config)
    result = models.actor.step()
    metrics |= {"actor_grad_norm": result.grad_norm, "lr": result.lr}
    metrics["skipped"] += float(result.skipped)
    return Update(metrics, tokens, exceeds_kl=False)


def _reduce_metrics(
    parts: Sequence[Mapping[str, Tensor]], models: Models, *, num_tokens: int
) -> dict[str, float]:
    """Compute means per token, and maxima, over all micro-batches and processes.

    In a pipeline, only the last stage computes the metrics of the micro-batches.
    """
    data = current_mesh().data
    numbers = iter(read_scalars([value for part in parts for value in part.values()]))
    local_metrics = [dict(zip(part, numbers)) for part in parts]  # noqa: B905  # `part` ends first
    rows = models.policy_passes.from_last_stage(local_metrics)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    maxima = {name: max(0.0, *columns.pop(name)) for name in ("ratio_max", "ratio_error")}
    sums = dict(zip(columns, data.sums(list(map(sum, columns.values()))), strict=True))
    return {name: total / num_tokens for name, total in sums.items()} | {
        name: data.max(largest) for name, largest in maxima.items()
    }


def _backward_values(
    models: Models,
    batches: Sequence[MicroBatch],
    config: PPOConfig,
    weighting: Weighting,
    *,
    forward: ForwardPass | None,
) -> list[dict[str, Tensor]]:
    """Add the critic's gradients; return sums over the tokens of each micro-batch.

    The actor's backward passes have finished by then, so only one model's graphs are in memory,
    unless `forward` holds both.
    """
    assert models.value_passes is not None
    metrics: list[dict[str, Tensor]] = []

    def compute_loss(batch: MicroBatch) -> Tensor:
        assert models.critic is not None
        assert batch.old_values is not None
        assert batch.returns is not None
        values = models.critic(batch.tokens) if forward is None else forward.values
        assert values is not None
        loss = value_loss(
            values,
            batch.old_values,
            batch.returns,
            clip=config.value_clip,
            counted=batch.counted,
        )
        num_clipped = values.new_zeros(())
        if config.value_clip is not None:
            is_clipped = (values - batch.old_values).abs() > config.value_clip
            num_clipped = (is_clipped * batch.counted).sum()
        metrics.append({"value_loss": loss.detach(), "value_clip_fraction": num_clipped})
        return loss

    models.value_passes.forward_backward(batches, compute_loss, divisor=weighting.num_tokens)
    return metrics


def _split_rows(rollout: Rollout, rows: Sequence[int], config: PPOConfig) -> list[MicroBatch]:
    """Split a minibatch's rows into micro-batches."""
    sequences = [rollout.experience.sequences[row] for row in rows]
    return [
        rollout.micro_batch([rows[index] for index in part])
        for part in split_micro_batches(config, sequences)
    ]


def _get_weights(rollout: Rollout, rows: Sequence[int], config: PPOConfig) -> tuple[Weighting, int]:
    """Return a minibatch's weighting over all processes, and its total number of response tokens.

    The total includes tokens that are excluded from the loss; the weighting ignores them.
    """
    mask = rollout.experience.mask
    index = to_device(torch.tensor(list(rows), dtype=torch.long), mask.device)
    lengths, counted = mask[index].sum(dim=1), rollout.counted[index]
    counts = (lengths * counted).sum(), counted.sum(), lengths.sum()
    tokens, responses, all_tokens = current_mesh().data.sums(read_scalars(counts))
    weighting = Weighting(
        config.aggregate,
        num_tokens=max(1, int(tokens)),
        num_responses=max(1, int(responses)),
        max_new_tokens=config.max_new_tokens,
    )
    return weighting, int(all_tokens)


def _backward_policy(
    models: Models,
    batches: Sequence[MicroBatch],
    config: PPOConfig,
    weighting: Weighting,
    *,
    forward: ForwardPass | None,
) -> list[dict[str, Tensor]]:
    """Add the policy's gradients; return sums over the tokens of each micro-batch."""
    all_metrics: list[dict[str, Tensor]] = []

    def compute_loss(batch: MicroBatch) -> Tensor:
        if config.method == "gkd":
            objective, metrics = _distillation_loss(models, batch, config, weighting)
            all_metrics.append(metrics)
            return objective
        if forward is None:
            outputs: TokenLogprobs = models.actor(
                batch.tokens, temperature=config.temperature, entropy=config.entropy_coef > 0
            )
        else:
            outputs = forward.policy
        objective, metrics = _policy_loss(outputs, batch, config, weighting)
        all_metrics.append(metrics)
        return objective

    models.policy_passes.forward_backward(batches, compute_loss, divisor=weighting.num_tokens)
    return all_metrics


def _distillation_loss(
    models: Models, batch: MicroBatch, config: PPOConfig, weighting: Weighting
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the summed divergence from the teacher, and metrics.

    The actor runs within the teacher's pass, while the teacher's output layer is gathered.
    """
    assert models.reference is not None
    tokens, engine = batch.tokens, models.reference.engine
    weights = weighting.token_weights(batch.lengths) * batch.counted
    targets = tokens.input_ids[tokens.targets]

    def compare(teacher: Logits) -> tuple[Tensor, ...]:
        settings = {"beta": config.gkd_beta, "temperature": config.temperature}
        with torch.enable_grad():
            return models.actor(
                tokens, fn=lambda *x: gkd_loss(Logits(*x), teacher, targets, weights, **settings)
            )

    with evaluating(engine.model):
        loss, logprobs, reverse_kl = engine(tokens, fn=lambda *x: compare(Logits(*x)))
    counted = batch.counted
    metrics = {"policy_loss": loss.detach(), "reverse_kl": (reverse_kl * counted).sum()}
    return loss, metrics | _ratio_metrics(logprobs, batch)


def _policy_loss(
    outputs: TokenLogprobs, batch: MicroBatch, config: PPOConfig, weighting: Weighting
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the policy's summed loss on a micro-batch, and metrics."""
    region = TrustRegion(
        config.clip, config.clip if config.clip_high is None else config.clip_high, config.dual_clip
    )
    logprobs, entropy = outputs.logprobs, outputs.entropy
    advantages = batch.advantages
    weights = weighting.token_weights(batch.lengths) * batch.counted
    policy_loss = LOSSES[config.loss]
    ratio = policy_loss.ratio(logprobs, batch.old_logprobs, batch.mask)
    losses = policy_loss.losses(ratio, logprobs, advantages, region)
    corrected = weights if batch.correction is None else weights * batch.correction
    objective = (corrected * losses).sum()
    metrics = {"policy_loss": objective.detach()}
    if config.kl_in == "loss" and batch.ref_logprobs is not None:
        estimator = "k3_is" if config.kl_estimator == "auto" else config.kl_estimator
        log_ratio = logprobs - batch.ref_logprobs
        kls = KL_LOSSES[estimator](log_ratio, policy_ratio(logprobs, batch.old_logprobs))
        kl_loss = (corrected * kls).sum()
        objective = objective + batch.kl_coef * kl_loss
        metrics["kl_loss"] = kl_loss.detach()
    if config.entropy_coef > 0 and entropy is not None:
        objective = objective - config.entropy_coef * (weights * entropy).sum()
    with torch.no_grad():
        is_clipped = policy_loss.is_clipped(ratio, advantages, region)
        metrics["clip_fraction"] = (is_clipped * batch.counted).sum()
        return objective, metrics | _ratio_metrics(logprobs, batch)


def _ratio_metrics(logprobs: Tensor, batch: MicroBatch) -> dict[str, Tensor]:
    """Return sums and maxima that show how far the ratios are from 1."""
    ratio = policy_ratio(logprobs, batch.old_logprobs)
    return {
        "approx_kl": 0.5 * (ratio.log().square() * batch.counted).sum(),
        "ratio_mean": (ratio * batch.counted).sum(),
        "ratio_max": ratio.max() if len(ratio) else ratio.new_zeros(()),
        "ratio_error": (ratio - 1).abs().max() if len(ratio) else ratio.new_zeros(()),
    }


def _backward_ptx(models: Models, ptx: PtxStream, config: PPOConfig) -> float:
    """Add the gradient of ptx_coef * mean NLL per token; return the mean NLL."""
    batches, num_targets = next(ptx)
    losses: list[Tensor] = []

    def compute_loss(batch: TokenBatch) -> Tensor:
        loss = -models.actor(batch, uniform=True).logprobs.sum()
        losses.append(loss.detach())
        return config.ptx_coef * loss

    models.policy_passes.forward_backward(batches, compute_loss, divisor=num_targets)
    return current_mesh().data.sum(models.policy_passes.total(losses)) / num_targets
