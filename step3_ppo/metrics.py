"""Metrics of a rollout and its episodes, over all processes.

Dimension name: B responses of this process; responses to the same prompt are adjacent.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from evaluation.statistics import global_moments, standard_error
from inference.engine.requests import Response, repeated_trigrams
from pipeline.parallel.mesh import current_mesh
from step3_ppo.advantages import all_equal, group_std
from step3_ppo.config import PPOConfig
from step3_ppo.episodes import EpisodeResponse
from step3_ppo.experience import Experience, Rollout
from step3_ppo.losses import k3


def rollout_statistics(
    rollout: Rollout, score: Float[Tensor, " B"] | None = None
) -> dict[str, float]:
    """Compute the metrics of a rollout that are means or maxima over all processes.

    `score` is the mean of the argument (by default the reward model's raw score), ignoring NaN,
    `score_stderr` is its standard error, and `reward_score` is the mean of the maximized reward.
    `uncounted` is the fraction of responses that are in neither a baseline nor a loss.
    `rollout_gap` and `rollout_gap_max` are the mean and the largest absolute difference in
    log-probability between generation and training.
    """
    experience = rollout.experience
    mask = experience.mask
    score = experience.score if score is None else score
    assert score is not None
    known = ~score.isnan()
    known_scores = score[known].double()
    gap = (experience.sampled_logprobs - experience.logprobs)[mask].abs()
    sums = {
        "responses": float(len(mask)),
        "tokens": mask.sum(),
        "scored": float(len(known_scores)),
        "score": known_scores.sum(),
        "score_squares": known_scores.square().sum(),
        "reward_score": rollout.reward_score[rollout.counted].double().sum(),
        "counted": rollout.counted.sum(),
        "entropy": experience.entropy[mask].double().sum(),
        "stopped": experience.stopped.sum(),
        "gap": gap.double().sum(),
        "repeated": float(repeated_tokens(experience)),
    }
    totals = dict(zip(sums, current_mesh().data.sums(list(map(float, sums.values()))), strict=True))
    responses, tokens = totals["responses"], totals["tokens"]
    num_scored = max(1.0, totals["scored"])
    mean = totals["score"] / num_scored
    return {
        "score": mean,
        "score_stderr": standard_error(score, group_size=rollout.group_size),
        "score_std": max(0.0, totals["score_squares"] / num_scored - mean**2) ** 0.5,
        "reward_score": totals["reward_score"] / max(1.0, totals["counted"]),
        "uncounted": 1 - totals["counted"] / responses,
        "entropy": totals["entropy"] / tokens,
        "response_length": tokens / responses,
        "stop_rate": totals["stopped"] / responses,
        "repetition": totals["repeated"] / tokens,
        "rollout_gap": totals["gap"] / tokens,
        "rollout_gap_max": current_mesh().data.max(gap.max().item()),
        **kl_statistics(experience),
        **critic_statistics(rollout),
        **group_statistics(rollout),
        **correction_statistics(rollout),
    }


def kl_statistics(
    experience: Experience, counted: Bool[Tensor, " B"] | None = None
) -> dict[str, float]:
    """Estimate the KL to the reference in nats per response, by k1 (`kl`) and by k3 (`kl_k3`).

    Only the `counted` responses are used, by default all. The result is empty without a reference.
    """
    if experience.ref_logprobs is None:
        return {}
    if counted is None:
        counted = torch.ones_like(experience.stopped)
    mask = experience.mask & counted[:, None]
    log_ratio = (experience.logprobs - experience.ref_logprobs)[mask]
    sums = (log_ratio.double().sum(), k3(log_ratio).double().sum(), counted.sum())
    kl, kl_k3, count = current_mesh().data.sums([total.item() for total in sums])
    return {"kl": kl / count, "kl_k3": kl_k3 / count}


def critic_statistics(rollout: Rollout) -> dict[str, float]:
    """Compute mean value and explained variance on counted tokens, or {} without a critic."""
    mask = rollout.experience.mask & rollout.counted[:, None]
    values = rollout.experience.values
    if values is None or rollout.returns is None:
        return {}
    mean, _ = global_moments(values, mask)
    _, residual_variance = global_moments(rollout.returns - values, mask)
    _, return_variance = global_moments(rollout.returns, mask)
    explained = 1 - residual_variance / return_variance if return_variance > 0 else 0.0
    return {"value": mean, "explained_variance": explained}


def group_statistics(rollout: Rollout) -> dict[str, float]:
    """Compute the groups' mean standard deviation, and the fraction of groups with equal rewards.

    `dead_right` is the fraction of groups with equal rewards above 0, and `dead_wrong` the fraction
    of other groups with equal rewards. The result is empty with one response per prompt.
    """
    if rollout.group_size == 1:
        return {}
    grouped = rollout.reward_score.double().view(-1, rollout.group_size)
    counted = rollout.counted.view_as(grouped)
    is_dead = all_equal(grouped, counted)
    is_right = is_dead & ((grouped > 0) & counted).any(dim=1, keepdim=True)
    std, dead, right, count = current_mesh().data.sums(
        [
            group_std(grouped, counted).sum().item(),
            is_dead.sum().item(),
            is_right.sum().item(),
            len(grouped),
        ]
    )
    return {
        "group_std": std / count,
        "dead_groups": dead / count,
        "dead_right": right / count,
        "dead_wrong": (dead - right) / count,
    }


def correction_statistics(rollout: Rollout) -> dict[str, float]:
    """Compute the mean weight, and the effective sample size (Kish 1965) as a fraction of tokens.

    The result is empty without a correction.
    """
    if rollout.correction is None:
        return {}
    weights = rollout.correction[rollout.experience.mask & rollout.counted[:, None]].double()
    total, squares, count = current_mesh().data.sums(
        [weights.sum().item(), weights.square().sum().item(), len(weights)]
    )
    count = max(1.0, count)
    effective = total**2 / (count * squares) if squares > 0 else 0.0
    return {"correction": total / count, "correction_effective": effective}


def repeated_tokens(experience: Experience) -> int:
    """Count the response tokens that complete a repeated trigram, a sign of loops."""
    return sum(
        repeated_trigrams(
            [t for t, is_trained in zip(s.input_ids, s.trained, strict=True) if is_trained]
        )
        for s in experience.sequences
    )


def episode_statistics(responses: Sequence[Response], config: PPOConfig) -> dict[str, float]:
    """Compute means over an environment's episodes, if any; all processes must call this.

    `turns` is the number of the actor's responses, and `observation_length` the number of tokens
    between them. `ended_by_turns`, `ended_by_tokens` and `ended_by_failure` are the fractions of
    episodes that a limit or a failure ended. If a reward has several parts, each is averaged over
    the episodes that contain it, under a name that begins with the source's name.
    """
    if config.environment is None:
        return {}
    local = [
        metric
        for response in responses
        if isinstance(response, EpisodeResponse)
        for metric in _episode_metrics(response, config)
    ]
    values_by_name: dict[str, list[float]] = {}
    for metrics in current_mesh().data.gather_objects(local):
        for name, value in metrics:
            values_by_name.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in sorted(values_by_name.items())}


def _episode_metrics(episode: EpisodeResponse, config: PPOConfig) -> Iterator[tuple[str, float]]:
    yield "turns", float(episode.num_turns)
    yield "observation_length", float(episode.observation_length)
    for name, end in (("turns", "turns"), ("tokens", "tokens"), ("failure", "failed")):
        yield f"ended_by_{name}", float(episode.end == end)
    yield from get_reward_parts(episode, config).items()


def get_reward_parts(response: Response, config: PPOConfig) -> dict[str, float]:
    """Return the parts of an environment's reward by metric name, or {} for other responses."""
    source = config.environment_source
    if source is None or not isinstance(response, EpisodeResponse):
        return {}
    return {f"reward_{source.name}_{part}": x for part, x in response.reward.parts.items()}
