"""Scores of the reward model, and how they count for unfinished responses.

Dimension name: B responses of this process.
"""

import logging
import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from inference.generation import Response
from pipeline.data.batches import collate_part
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from step3_ppo.config import PPOConfig
from step3_ppo.episodes import whole_sequence
from step3_ppo.experience import own_micro_batches
from step3_ppo.models import Models

logger = logging.getLogger(__name__)


def raw_scores(
    models: Models,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Response],
    config: PPOConfig,
) -> Float[Tensor, " B"]:
    """The reward model's raw score of each sequence; all processes must call it."""
    assert models.reward is not None
    text = models.reward.text
    rows = [
        whole_sequence(prompt, response) if text is None else text.encode(prompt, response)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    scores = torch.zeros(len(rows), device=local_device())
    parts = own_micro_batches(config, [len(row) for row in rows])
    batches = [
        collate_part([rows[row] for row in part], spare=rows[0]).to(local_device())
        for part in parts
    ]
    for part, found in zip(parts, models.reward.scores(batches), strict=True):
        scores[part] = found[: len(part)].float()
    return scores


def counted_scores(
    score: Float[Tensor, " B"] | None,
    stopped: Bool[Tensor, " B"],
    models: Models,
    config: PPOConfig,
) -> Float[Tensor, " B"]:
    """Raw scores as metrics report them, in the reward model's own unit.

    The reward model was trained on finished responses: its score of a truncated one is meaningless
    and may be high. Such a response counts as `missing_eos_score`, as in PPO's reward, or as its
    own score if that is lower.
    """
    assert score is not None
    assert models.reward is not None
    if config.missing_eos_score is None:
        return score
    most = config.missing_eos_score
    if config.normalize_score:
        most = models.reward.mean + models.reward.std * most
    return torch.where(stopped, score, score.clamp(max=most))


def reward_of(
    score: Float[Tensor, " B"] | None,
    stopped: Bool[Tensor, " B"],
    models: Models,
    config: PPOConfig,
) -> Float[Tensor, " B"]:
    """Raw scores as they enter PPO's reward: normalized and clipped.

    An unfinished response gets at most `missing_eos_score`. A flat replacement would reward never
    ending wherever the reward model scores finished responses even lower.
    """
    assert score is not None
    assert models.reward is not None
    if config.normalize_score:
        score = models.reward.normalized(score)
    if config.score_clip is not None:
        score = score.clamp(-config.score_clip, config.score_clip)
    if config.missing_eos_score is not None:
        score = torch.where(stopped, score, score.clamp(max=config.missing_eos_score))
    return score


def measured_moments(
    models: Models,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Response],
    config: PPOConfig,
) -> list[float]:
    """Mean and standard deviation of the raw score over the finished responses of all processes.

    For a reward model without stored moments. If fewer than two responses finished, all count.
    """
    score = raw_scores(models, prompts, responses, config).double().cpu()
    stopped = torch.tensor([response.stopped for response in responses])
    ended, generated = current_mesh().data.sums([stopped.sum().item(), len(responses)])
    if ended < 2:
        logger.warning(
            "%d of %d responses of the first rollout ended: the reward model's scores are"
            " normalized by those of responses without an end; raise ppo.max_new_tokens",
            ended,
            generated,
        )
        stopped = torch.ones_like(stopped)
    own = score[stopped]
    total, count = current_mesh().data.sums([own.sum().item(), len(own)])
    mean = total / count
    (squares,) = current_mesh().data.sums([(own - mean).square().sum().item()])
    std = math.sqrt(squares / count)
    return [mean, std if std > 1e-6 * max(1.0, abs(mean)) else 1.0]
