"""Does a reward model score length? Beside what a program that knows nothing but length gets."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from step2_reward.lab.ranks import spearman


@dataclass(frozen=True)
class Scored:
    """The responses to one prompt."""

    scores: Sequence[float]
    lengths: Sequence[int]
    """Tokens of each response."""
    worth: Sequence[float]
    """How good the data says each response is: higher is better, equal ones are ties."""


@dataclass(frozen=True)
class Share:
    """A share of pairs that are ordered right."""

    right: float
    pairs: int

    @property
    def value(self) -> float | None:
        """The share; None of no pairs."""
        return self.right / self.pairs if self.pairs else None


@dataclass(frozen=True)
class LengthBias:
    """How scores go with length."""

    spearman: float
    """Rank correlation of score and length within prompts, mean over those whose lengths differ."""
    of_data: float
    """The same of the data's own preference: what a model that is right has."""
    better_longer: Share
    """Pairs whose better response is the longer one."""
    better_shorter: Share
    always_longer: float
    """Accuracy of taking the longer response, ties half: a baseline that reads nothing."""
    always_shorter: float


def length_bias(prompts: Sequence[Scored]) -> LengthBias:
    """The length bias over prompts of two responses or more."""
    longer, shorter, even = _Count(), _Count(), 0
    for prompt in prompts:
        for better, worse in ordered_pairs(prompt.worth):
            difference = prompt.scores[better] - prompt.scores[worse]
            right = 1.0 if difference > 0 else 0.5 if difference == 0 else 0.0
            if prompt.lengths[better] == prompt.lengths[worse]:
                even += 1
            else:
                is_longer = prompt.lengths[better] > prompt.lengths[worse]
                (longer if is_longer else shorter).add(right)
    total = longer.pairs + shorter.pairs + even
    always = (longer.pairs + 0.5 * even) / max(1, total)
    return LengthBias(
        spearman=_within([(each.scores, each.lengths) for each in prompts]),
        of_data=_within([(each.worth, each.lengths) for each in prompts]),
        better_longer=Share(longer.right, longer.pairs),
        better_shorter=Share(shorter.right, shorter.pairs),
        always_longer=always,
        always_shorter=1 - always if total else 0.0,
    )


def ordered_pairs(worth: Sequence[float]) -> list[tuple[int, int]]:
    """(better, worse) of every two responses of different worth."""
    places = range(len(worth))
    return [(one, other) for one in places for other in places if worth[one] > worth[other]]


class _Count:
    def __init__(self) -> None:
        self.right, self.pairs = 0.0, 0

    def add(self, right: float) -> None:
        self.right += right
        self.pairs += 1


def _within(prompts: Sequence[tuple[Sequence[float], Sequence[int]]]) -> float:
    """Mean rank correlation over the prompts of which both vary in length."""
    found = [
        spearman(torch.tensor(values).double(), torch.tensor(lengths).double())
        for values, lengths in prompts
        if len(set(lengths)) > 1
    ]
    return sum(found) / len(found) if found else 0.0
