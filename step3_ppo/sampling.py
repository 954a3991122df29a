"""The responses of an iteration; groups without a gradient are replaced by further prompts.

Dimension name: B responses of this process.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from inference.generation import Response
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from rewards.contract import Scored
from step3_ppo.config import PPOConfig
from step3_ppo.episodes import OnResponse
from step3_ppo.groups import are_equal
from step3_ppo.models import Models
from step3_ppo.prompts import PromptBatch, Prompts
from step3_ppo.response_rewards import rewards_of
from step3_ppo.rollout import generate_responses, with_overlong
from step3_ppo.scoring import raw_scores
from step3_ppo.shared_play import play_shared
from step3_ppo.statistics import episode_statistics

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampled:
    """This process's part of a rollout; the responses to a prompt are adjacent."""

    inputs: list[list[int]]
    """Prompts in token ids."""

    responses: list[Response]

    metrics: dict[str, float]
    """`refills`, the number of replacements, with dynamic sampling; of an environment's episodes
    the metrics of `step3_ppo.statistics.episode_statistics`."""

    given: dict[str, Scored] | None = None
    """The sources' rewards of the responses, where they were needed for dynamic sampling."""


def sample_rollout(models: Models, prompts: Prompts, config: PPOConfig) -> Sampled:
    """Sample responses to the next prompts, and to further ones where all rewards are equal.

    A group with equal rewards has no gradient: its prompt is replaced by the next one of the
    stream, in at most `dynamic_sampling` rounds (Yu et al. 2025, eq. 11). Groups that are still
    equal after that are kept. All processes know which groups are replaced, and prompts are
    assigned in the order of the groups, so that any number of processes samples the same.
    """
    batch = prompts.next_batch()
    inputs = list(batch.inputs)
    responses = respond(models, batch, config)
    if config.dynamic_sampling == 0:
        return Sampled(inputs, responses, episode_statistics(responses, config))
    given = models.sources.results()
    scores = _scores(models, inputs, responses, config)
    refills = 0
    for _ in range(config.dynamic_sampling):
        dead = _dead_groups(models, scores, given, responses, config)
        if not dead:
            break
        refills += len(dead)
        batch = prompts.next_batch(dead)
        rows = _rows(batch.groups, config.group_size)
        fresh = respond(models, batch, config)
        for row, prompt, response in zip(rows, batch.inputs, fresh, strict=True):
            inputs[row], responses[row] = prompt, response
        for name, scored in models.sources.results().items():
            for place, row in enumerate(rows):
                given[name].values[row] = scored.values[place]
                given[name].failed[row] = scored.failed[place]
        if scores is not None:
            # Scoring is collective: a process without new responses scores an old one again.
            seen = rows or [0]
            own = ([inputs[row] for row in seen], [responses[row] for row in seen])
            scores[seen] = raw_scores(models, *own, config)
    dead = _dead_groups(models, scores, given, responses, config)
    if dead:
        logger.info(
            "after %d refills the responses to %d of %d prompts still have equal rewards",
            refills,
            len(dead),
            config.prompts_per_rollout,
        )
    metrics = {"refills": float(refills)} | episode_statistics(responses, config)
    return Sampled(inputs, responses, metrics, given)


def respond(models: Models, batch: PromptBatch, config: PPOConfig) -> list[Response]:
    """The actor's responses to a batch; each is submitted to the reward programs as it ends."""
    submit = models.sources.submitting(batch.prompts, models.tokenizer)
    return sampled_responses(models, batch, config, on_response=submit)


def sampled_responses(
    models: Models,
    batch: PromptBatch,
    config: PPOConfig,
    *,
    on_response: OnResponse | None = None,
) -> list[Response]:
    """The actor's responses to a batch, or its episodes in an environment, drawn by its keys."""
    environments = models.sources.environments
    if environments is None:
        return generate_responses(
            models, batch.inputs, config, keys=batch.keys, on_response=on_response
        )
    with models.hybrid_engine.generating() as actor:
        episodes = play_shared(
            actor,
            models.chat,
            environments,
            batch.prompts,
            config,
            temperature=config.temperature,
            seed=config.seed,
            keys=batch.keys,
            group_size=config.group_size,
            on_response=on_response,
        )
    return [*episodes]


def dead_groups(
    rewards: Float[Tensor, " B"], counted: Bool[Tensor, " B"], *, group_size: int
) -> list[int]:
    """The groups of the whole rollout whose counted rewards are all equal, in ascending order."""
    data = current_mesh().data
    grouped = rewards.double().view(-1, group_size)
    is_dead = are_equal(grouped, counted.view_as(grouped))[:, 0].tolist()
    own = [place * data.size + data.rank for place, dead in enumerate(is_dead) if dead]
    return sorted(group for theirs in data.gather_objects(own) for group in theirs)


def _rows(groups: Sequence[int], group_size: int) -> list[int]:
    """The rows of these groups' responses on this process."""
    size = current_mesh().data.size
    return [group // size * group_size + sample for group in groups for sample in range(group_size)]


def _scores(
    models: Models,
    inputs: Sequence[Sequence[int]],
    responses: Sequence[Response],
    config: PPOConfig,
) -> Float[Tensor, " B"] | None:
    """The reward model's scores, where there is one."""
    return None if models.reward is None else raw_scores(models, inputs, responses, config)


def _dead_groups(
    models: Models,
    scores: Float[Tensor, " B"] | None,
    given: Mapping[str, Scored],
    responses: Sequence[Response],
    config: PPOConfig,
) -> list[int]:
    """The groups of the whole rollout without a gradient, with overlong penalties applied."""
    device = local_device()
    stopped = torch.tensor([response.stopped for response in responses], device=device)
    lengths = torch.tensor([len(response.ids) for response in responses], device=device)
    rewards = rewards_of(models, scores, stopped, config, given=given)
    reward, counted = with_overlong(rewards.reward, lengths, stopped, config)
    return dead_groups(reward, counted & rewards.known, group_size=config.group_size)
