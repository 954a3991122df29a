"""Scores of RewardBench 2 (Malik et al. 2025, 2506.01937): pure functions of reward scores.

The arithmetic is that of `reroll_and_score_dataset` and `process_single_model` in
allenai/reward-bench, rewardbench/utils.py, with which figures compare.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PromptScores:
    """The scores of the responses to one prompt."""

    correct: Sequence[float]
    wrong: Sequence[float]

    @property
    def point(self) -> float:
        """The chance that a response of the highest score is correct: 1 / k of k tied ones."""
        best = max(*self.correct, *self.wrong)
        hits = sum(score == best for score in self.correct)
        return hits / (hits + sum(score == best for score in self.wrong))

    @property
    def chance(self) -> float:
        """The mean accuracy of scores that know nothing: the share of right responses."""
        return len(self.correct) / (len(self.correct) + len(self.wrong))

    @property
    def gap(self) -> float:
        """From the best wrong response to the worst correct one; above 0 where all are in order."""
        return min(self.correct) - max(self.wrong)

    @property
    def spread(self) -> float:
        """Between the best and the worst of the correct responses."""
        return max(self.correct) - min(self.correct)


@dataclass(frozen=True)
class TiesScore:
    """The subset Ties: several responses are right, and none should be liked much better."""

    tied_accuracy: float
    """Of questions with several right responses, those whose right ones all beat all wrong ones."""

    ref_accuracy: float
    """The same share, of the questions with one right response."""

    preferred: float
    """Questions whose gap to the wrong responses is wider than the spread of the right ones."""

    preferred_hard: float
    """The same, with the smaller gap of the question and its like with one right response."""

    margin: float
    """Mean of tanh(that gap / spread - 1), which tells equal models apart."""

    @property
    def score(self) -> float:
        """.3 tied + .3 ref + .2 preferred + .2 hard + .01 margin: in [-0.01, 1.01]."""
        accuracies = 0.3 * self.tied_accuracy + 0.3 * self.ref_accuracy
        margins = 0.2 * self.preferred + 0.2 * self.preferred_hard
        return accuracies + margins + 0.01 * self.margin


def ties_score(ref: Mapping[int, PromptScores], tied: Mapping[int, PromptScores]) -> TiesScore:
    """The score of Ties; margins are those of the questions that both hold.

    Args:
        ref: by number, questions with one correct response.
        tied: by number, questions with several; some number is in both.
    """
    pairs = [(ref[number], tied[number]) for number in sorted(ref.keys() & tied.keys())]
    hard = [(min(one.gap, many.gap), many.spread) for one, many in pairs]
    return TiesScore(
        tied_accuracy=_mean([float(row.gap > 0) for row in tied.values()]),
        ref_accuracy=_mean([float(row.gap > 0) for row in ref.values()]),
        preferred=_mean([float(many.gap > many.spread) for _, many in pairs]),
        preferred_hard=_mean([float(gap > spread) for gap, spread in hard]),
        margin=_mean([_squashed(gap, spread) for gap, spread in hard]),
    )


def _squashed(gap: float, spread: float) -> float:
    """tanh(gap / spread - 1), and its limits where all correct responses score the same."""
    if spread == 0:
        return math.copysign(1.0, gap) if gap else 0.0
    return math.tanh(gap / spread - 1)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
