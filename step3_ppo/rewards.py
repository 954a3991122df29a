"""Rewards of responses, from a reward model, programs, an environment, or a weighted sum of these.

Dimension name: B responses of this process.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from evaluation.statistics import global_moments, standard_error
from inference.engine.requests import Response
from pipeline.data.batches import collate_or_empty
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from rewards.contract import SourceResults
from rewards.mixture import GOLD, check_failures, mask_failures, weighted_sum
from step3_ppo.config import PPOConfig
from step3_ppo.models import Models, join_response, split_micro_batches
from step3_ppo.reward_settings import ENVIRONMENT_KIND, MODEL_KIND

logger = logging.getLogger(__name__)


def compute_raw_scores(
    models: Models,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Response],
    config: PPOConfig,
) -> Float[Tensor, " B"]:
    """Compute the reward model's raw score of each sequence; all processes must call this."""
    assert models.reward is not None
    text = models.reward.text
    rows = [
        join_response(prompt, response) if text is None else text.encode(prompt, response)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    scores = torch.zeros(len(rows), device=local_device())
    micro_batches = split_micro_batches(config, rows)
    batches = [
        collate_or_empty([rows[row] for row in indices], filler=rows[0]).to(local_device())
        for indices in micro_batches
    ]
    for indices, output in zip(micro_batches, models.reward.scores(batches), strict=True):
        scores[indices] = output[: len(indices)].float()
    return scores


def reported_scores(
    score: Float[Tensor, " B"] | None,
    stopped: Bool[Tensor, " B"],
    models: Models,
    config: PPOConfig,
) -> Float[Tensor, " B"]:
    """Convert raw scores to those reported in metrics, on the reward model's own scale.

    The reward model was trained on finished responses, so its scores of truncated responses are
    meaningless and may be high. They are therefore limited to `missing_eos_score`, as in PPO's
    reward.
    """
    assert score is not None
    assert models.reward is not None
    if config.missing_eos_score is None:
        return score
    limit = config.missing_eos_score
    if config.normalize_score:
        limit = models.reward.mean + models.reward.std * limit
    return torch.where(stopped, score, score.clamp(max=limit))


def score_to_reward(
    score: Float[Tensor, " B"] | None,
    stopped: Bool[Tensor, " B"],
    models: Models,
    config: PPOConfig,
) -> Float[Tensor, " B"]:
    """Convert raw scores to PPO's reward, normalized and clipped.

    An unfinished response gets at most `missing_eos_score`. A fixed score would reward not ending
    whenever the reward model scores finished responses even lower.
    """
    assert score is not None
    assert models.reward is not None
    if config.normalize_score:
        score = models.reward.normalize(score)
    if config.score_clip is not None:
        score = score.clamp(-config.score_clip, config.score_clip)
    if config.missing_eos_score is not None:
        score = torch.where(stopped, score, score.clamp(max=config.missing_eos_score))
    return score


def measure_scores(
    models: Models,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Response],
    config: PPOConfig,
) -> list[float]:
    """Return the raw scores' mean and standard deviation over all finished responses.

    If fewer than two responses are finished, unfinished ones are included.
    """
    score = compute_raw_scores(models, prompts, responses, config).double().cpu()
    stopped = torch.tensor([response.stopped for response in responses])
    num_finished, num_responses = current_mesh().data.sums([stopped.sum().item(), len(responses)])
    if num_finished < 2:
        logger.warning(
            "fewer than two of the %d responses in the first rollout are finished, so scores"
            " are normalized over all responses, even unfinished ones; raise ppo.max_new_tokens",
            num_responses,
        )
        stopped = torch.ones_like(stopped)
    mean, variance = global_moments(score, stopped)
    std = math.sqrt(variance)
    return [mean, std if std > 1e-6 * max(1.0, abs(mean)) else 1.0]


@dataclass(frozen=True)
class ResponseRewards:
    """The rewards of this process's responses."""

    reward: Float[Tensor, " B"]
    """The maximized reward; 0 if unknown."""

    score: Float[Tensor, " B"]
    """The reported score: the reward model's own score if it is the only source
    (`reported_scores`), otherwise the reward; NaN if unknown."""

    sources: Mapping[str, SourceResults] = field(default_factory=dict)
    """The values of each source, and `gold`; empty with only a reward model."""

    seconds: float = 0.0
    """Seconds spent waiting for the sources after all other work was done."""

    raw_score: Float[Tensor, " B"] | None = None
    """The reward model's raw score if it is the only reward; otherwise None."""

    @property
    def known(self) -> Bool[Tensor, " B"]:
        """Whether each response has a reward: a source applied, and none failed.

        If only a reward model is used, a score of NaN is not excluded, so that the run stops.
        """
        return ~self.score.isnan() if self.raw_score is None else torch.ones_like(self.score).bool()

    def by_source(self) -> dict[str, list[float | None]]:
        """Return the values of each source, by metric name."""
        return {
            name if name == GOLD else f"reward_{name}": results.values
            for name, results in self.sources.items()
        }

    def metrics(self, *, group_size: int = 1) -> dict[str, float]:
        """Return the sources' means, the fraction of unrewarded responses, and the waiting time.

        The standard error of gold accounts for the dependence between the `group_size` responses to
        each prompt.
        """
        if not self.sources:
            return {}
        sums = {"rows": len(self.score), "unknown": (~self.known).sum().item()}
        for name, values in self.by_source().items():
            present = [value for value in values if value is not None]
            sums[name] = sum(present)
            sums[f"{name} count"] = len(present)
        totals = dict(zip(sums, current_mesh().data.sums(list(sums.values())), strict=True))
        means = {
            name: totals[name] / totals[f"{name} count"]
            for name in self.by_source()
            if totals[f"{name} count"]
        }
        if GOLD in means:
            gold = _to_tensor(self.sources[GOLD].values, self.score)
            means |= {f"{GOLD}_stderr": standard_error(gold, group_size=group_size)}
        return {
            **means,
            "reward_failures": totals["unknown"] / totals["rows"],
            "seconds_rewards": self.seconds,
        }


def compute_rewards(
    models: Models,
    score: Float[Tensor, " B"] | None,
    stopped: Bool[Tensor, " B"],
    config: PPOConfig,
    *,
    source_rewards: Mapping[str, SourceResults] | None = None,
    strict: bool = True,
) -> ResponseRewards:
    """Compute the rewards of the responses that were submitted since the last call.

    Args:
        models: the reward model, if there is one, and the sources.
        score: the reward model's raw score of each response.
        stopped: whether each response ended with a stop token.
        config: settings of the step.
        source_rewards: the sources' values, if they are already collected.
        strict: whether failures may stop the run.

    Raises:
        RewardError: a source failed on a larger fraction of all processes' responses than
            `max_reward_failures`.
    """
    model_reward = None if score is None else score_to_reward(score, stopped, models, config)
    source_rewards = models.sources.results() if source_rewards is None else source_rewards
    seconds = models.sources.seconds
    if strict:
        check_source_failures(source_rewards, config, num_rows=len(stopped))
    if config.is_distillation:  # the only rewards are per token
        zeros = torch.zeros(len(stopped), device=stopped.device)
        return ResponseRewards(zeros, zeros, source_rewards, seconds)
    if not config.rewards:
        assert model_reward is not None
        reported = reported_scores(score, stopped, models, config)
        return ResponseRewards(model_reward, reported, source_rewards, seconds, score)
    sources: dict[str, SourceResults] = {}
    for source in config.rewards:
        if source.kind == MODEL_KIND:
            assert model_reward is not None
            sources[source.name] = SourceResults(model_reward.tolist(), [None] * len(stopped))
        else:
            sources[source.name] = source_rewards[source.name]
    results = [sources[source.name] for source in config.rewards]
    # An environment's failure counts even at weight 0, because the episode is then incomplete.
    failure_weights = [1.0 if s.kind == ENVIRONMENT_KIND else s.weight for s in config.rewards]
    values = mask_failures(results, failure_weights)
    weights = [source.weight for source in config.rewards]
    reward = _to_tensor(weighted_sum(values, weights), stopped)
    gold = {GOLD: source_rewards[GOLD]} if GOLD in source_rewards else {}
    return ResponseRewards(reward.nan_to_num(nan=0.0), reward, {**sources, **gold}, seconds)


def _to_tensor(values: Sequence[float | None], like: Tensor) -> Float[Tensor, " B"]:
    numbers = [math.nan if value is None else value for value in values]
    return torch.tensor(numbers, dtype=torch.float32, device=like.device)


def check_source_failures(
    results: Mapping[str, SourceResults], config: PPOConfig, *, num_rows: int
) -> None:
    """Stop all processes together if a source used in training failed too often.

    Raises:
        RewardError: a source failed on a larger fraction of responses than `max_reward_failures`.
    """
    if not results:
        return
    local = {n: (s.num_failed, s.first_failure) for n, s in results.items() if n != GOLD}
    gathered = current_mesh().data.gather_objects((num_rows, local))
    check_failures(
        {name: sum(failures[name][0] for _, failures in gathered) for name in local},
        num_rows=sum(rows for rows, _ in gathered),
        first_failures={
            name: next((failures[name][1] for _, failures in gathered if failures[name][1]), None)
            for name in local
        },
        max_failures=config.max_reward_failures,
    )
