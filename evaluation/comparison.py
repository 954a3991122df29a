"""Compare models on the same prompts: win rates, optionally length-controlled.

Dimension names: P prompts, K prompts with a verdict.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from pipeline.report.figures import Interval, change_interval

NEWTON_STEPS = 50
"""Number of Newton steps of a fit, more than it needs; each changes a weight by at most 2."""


@dataclass(frozen=True)
class Match:
    """Two models compared on the same prompts, some of which may have no verdict."""

    model: int
    opponent: int
    """Indices of the two models."""

    points: Float[ndarray, " P"]
    """1 if `model` wins, 0.5 for a tie, 0 if `opponent` wins; NaN without a verdict."""

    length_difference: Float[ndarray, " P"]
    """Length of the model's response minus the opponent's, in characters."""

    @property
    def verdicts(self) -> Float[ndarray, " K"]:
        """Points on the prompts that have a verdict."""
        return self.points[~np.isnan(self.points)]

    @property
    def win_rate(self) -> float:
        """Mean of the points; NaN if there is no verdict."""
        return float(self.verdicts.mean()) if len(self.verdicts) else math.nan

    @property
    def counts(self) -> tuple[int, int, int]:
        """The model's wins, losses and ties."""
        verdicts = self.verdicts
        return int((verdicts == 1).sum()), int((verdicts == 0).sum()), int((verdicts == 0.5).sum())

    @property
    def interval(self) -> Interval:
        """95% interval of the win rate, for paired verdicts (Agresti and Min 2005)."""
        wins, losses, ties = self.counts
        low, high = change_interval(wins, losses, wins + losses + ties)
        return 0.5 + low / 2, 0.5 + high / 2

    @property
    def length_controlled(self) -> float:
        """Win rate expected for responses of equal length; see the function `length_controlled`."""
        has_verdict = ~np.isnan(self.points)
        return length_controlled(self.points[has_verdict], self.length_difference[has_verdict])


def length_controlled(points: Float[ndarray, " P"], differences: Float[ndarray, " P"]) -> float:
    """Return the win rate with the effect of response length removed.

        P(win) = sigma(theta + phi tanh(d / std(d)))

    is fitted to the points by logistic regression, d being the difference in length; at d = 0 it is
    sigma(theta) (Dubois et al. 2024, arXiv:2404.04475, eq. 1, without the prompt-difficulty term,
    which needs many models to fit). phi has a Gaussian prior of variance 1, and half a win and half
    a loss at d = 0 are added, so that the fit stays finite if one model always wins.
    """
    spread = float(differences.std()) if len(differences) else 0.0
    effect = np.tanh(differences / spread) if spread > 0 else np.zeros_like(differences)
    # Add a prior observation: one prompt with half a point.
    targets = np.append(points, 0.5)
    inputs = np.stack([np.ones(len(targets)), np.append(effect, 0.0)], axis=1)
    prior = np.diag([0.0, 1.0])
    weights = np.zeros(2)
    for _ in range(NEWTON_STEPS):
        probability = 1 / (1 + np.exp(-inputs @ weights))
        gradient = inputs.T @ (targets - probability) - prior @ weights
        curvature = (inputs * (probability * (1 - probability))[:, None]).T @ inputs + prior
        step = np.linalg.solve(curvature, gradient)
        weights += step * min(1.0, 2.0 / max(1e-12, float(np.abs(step).max())))
    return float(1 / (1 + np.exp(-weights[0])))
