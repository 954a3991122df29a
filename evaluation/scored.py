"""Scored responses to held-out prompts, and metrics that compare two models."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ScoredResponse:
    """A model's response to a held-out prompt."""

    text: str
    """The response; for an episode, all its turns."""
    score: float | None
    """The reward model's score if it is the only source of rewards, otherwise the reward; None if
    unknown."""
    length: int
    """Length in tokens, including the end-of-turn token."""
    stopped: bool
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """Reward of each source, by the name of its metric."""
    opening: Sequence[Mapping[str, Any]] = ()
    """Messages with which an episode's environment began; empty without an environment."""
    raw_score: float | None = None
    """The reward model's own score, without `score`'s bound on unfinished responses;
    None if the reward comes from sources."""


@dataclass(frozen=True)
class HeldOutResponses:
    """A model's greedy and sampled responses to the held-out prompts."""

    greedy: list[ScoredResponse]
    sampled: list[ScoredResponse]
    kl: float
    """KL divergence from the reference in nats per sampled response; NaN for the base, for which it
    is not measured."""

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "HeldOutResponses":
        """Rebuild the responses from the result of `dataclasses.asdict`."""
        return cls(
            greedy=[ScoredResponse(**response) for response in state["greedy"]],
            sampled=[ScoredResponse(**response) for response in state["sampled"]],
            kl=state["kl"],
        )


def mean(values: Sequence[float]) -> float:
    """Return the mean, or NaN if there are no values."""
    return sum(values) / len(values) if values else math.nan


def scored_pairs(
    new: Sequence[ScoredResponse], old: Sequence[ScoredResponse]
) -> list[tuple[float, float]]:
    """Return both models' scores on the prompts where both are known."""
    return [
        (a.score, b.score)
        for a, b in zip(new, old, strict=True)
        if a.score is not None and b.score is not None
    ]


def win_rate(new: Sequence[ScoredResponse], old: Sequence[ScoredResponse]) -> float:
    """Return the fraction of prompts on which the new response scores higher; ties count half."""
    return mean([(a > b) + 0.5 * (a == b) for a, b in scored_pairs(new, old)])


def compare_scores(
    new: Sequence[ScoredResponse], old: Sequence[ScoredResponse]
) -> dict[str, int | float]:
    """Return the win rate, and the numbers of prompts, wins and losses it is computed from."""
    pairs = scored_pairs(new, old)
    return {
        "win_rate": win_rate(new, old),
        "prompts": len(pairs),
        "wins": sum(a > b for a, b in pairs),
        "losses": sum(a < b for a, b in pairs),
    }


def mean_score(responses: Sequence[ScoredResponse]) -> float:
    """Return the mean score of the responses whose score is known."""
    return mean([response.score for response in responses if response.score is not None])


def source_means(responses: Sequence[ScoredResponse]) -> dict[str, float]:
    """Return the mean reward of each source that gave rewards, by metric name."""
    names = dict.fromkeys(name for response in responses for name in response.rewards)
    values = {
        name: [value for response in responses if (value := response.rewards.get(name)) is not None]
        for name in names
    }
    return {name: mean(known) for name, known in values.items() if known}


def mean_length(responses: Sequence[ScoredResponse]) -> float:
    """Return the mean length in tokens."""
    return sum(response.length for response in responses) / len(responses)


def stop_rate(responses: Sequence[ScoredResponse]) -> float:
    """Return the fraction of responses that end with an end token."""
    return sum(response.stopped for response in responses) / len(responses)


def summarize(
    before: HeldOutResponses, after: HeldOutResponses, *, name: str = "score"
) -> dict[str, int | float]:
    """Return the `eval` object of step 3, on greedy responses except for `kl` and `sampled_*`.

    Args:
        before: responses of the model that step 3 started from.
        after: responses of the exported model.
        name: name of the scores: `reward` if they come from sources.
    """
    return {
        f"{name}_before": mean_score(before.greedy),
        f"{name}_after": mean_score(after.greedy),
        "kl": after.kl,
        **compare_scores(after.greedy, before.greedy),
        "length_before": mean_length(before.greedy),
        "length_after": mean_length(after.greedy),
        "stop_rate": stop_rate(after.greedy),
        f"sampled_{name}_before": mean_score(before.sampled),
        f"sampled_{name}_after": mean_score(after.sampled),
        "sampled_stop_rate": stop_rate(after.sampled),
        **_source_means(before.greedy, "before"),
        **_source_means(after.greedy, "after"),
    }


def _source_means(responses: Sequence[ScoredResponse], suffix: str) -> dict[str, float]:
    return {f"{name}_{suffix}": value for name, value in source_means(responses).items()}
