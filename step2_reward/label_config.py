"""Settings of what step 2 learns: which labels, by which loss, and how classes count."""

from dataclasses import dataclass
from typing import Literal

from pipeline.errors import require

LabelKind = Literal["pairs", "ties", "classes", "ordinal", "scalar", "rankings", "steps"]


Loss = Literal[
    "bradley_terry",
    "focal",
    "rao_kupper",
    "cross_entropy",
    "proportional_odds",
    "mse",
    "bce",
    "plackett_luce",
]


LOSSES: dict[str, tuple[Loss, ...]] = {
    "pairs": ("bradley_terry", "focal"),
    "ties": ("rao_kupper",),
    "classes": ("cross_entropy", "focal"),
    "ordinal": ("proportional_odds",),
    "scalar": ("mse", "bce"),
    "rankings": ("plackett_luce",),
    "steps": ("bce",),
}
"""Of each kind of label, the usual loss first."""


@dataclass(frozen=True, kw_only=True)
class LabelSettings:
    """What a reward model learns from."""

    labels: Literal["auto", LabelKind] = "auto"
    """What rows say of responses (docs/reward_models.md): pairs, pairs that may be ties, classes,
    ordered classes, numbers, ranked lists, or steps; auto goes by the rows' columns."""

    loss: Literal["auto", Loss] = "auto"
    """How labels are learned; auto takes the usual loss of each kind. Others are focal (pairs,
    classes) and bce (numbers from 0 to 1)."""

    focal_gamma: float = 2.0
    """Of the focal loss: a row counts (1 - p)^gamma, p the probability of its label; 0 is the usual
    loss."""

    class_list: tuple[str, ...] = ()
    """Names of the classes in the model's order, of ordered ones the worst first; empty takes those
    that the rows have, in ascending order."""

    class_values: tuple[float, ...] = ()
    """What each class is worth: RL's score is the expected value. Empty takes labels that are
    numbers, or false and true as 0 and 1; named classes have no value then, and give no score."""

    class_weights: tuple[float, ...] = ()
    """Weight of each class in the loss; empty weighs rows alike."""

    class_balance_beta: float = 0.0
    """Weigh a class of n rows by (1 - beta) / (1 - beta^n) (Cui et al. 2019): 0 weighs rows alike,
    0.999 favours classes of fewer than a thousand rows."""

    down_sample: float | None = None
    """Train on at most that many times the rows of the rarest class, of each class; null takes all
    rows."""

    step_separator: str = "\n"
    """What stands between the steps of a response, in training and where RL reads them."""

    step_score: Literal["min", "product", "last"] = "min"
    """RL's score of a response in steps: the log-odds of the worst step or of the last one, or the
    log-probability that all are right (product)."""

    max_ranked: int = 8
    """Responses of a ranked list that are learned, at most: the best and the worst, and of those
    between the better ones."""

    def check_labels(self) -> None:
        """Raise ConfigError for a setting that can't be, or contradicts another."""
        require(
            self.labels == "auto" or self.loss == "auto" or self.loss in LOSSES[self.labels],
            f"loss {self.loss} does not learn from labels {self.labels}; choose"
            f" {' or '.join(LOSSES.get(self.labels, ()))}",
        )
        require(self.focal_gamma >= 0, f"focal_gamma must not be below 0, got {self.focal_gamma}")
        require(
            0 <= self.class_balance_beta < 1,
            f"class_balance_beta must lie in [0, 1), got {self.class_balance_beta}",
        )
        require(
            not (self.class_weights and self.class_balance_beta),
            "class_weights and class_balance_beta exclude each other; set one of them",
        )
        require(
            len(set(self.class_list)) == len(self.class_list) != 1,
            f"class_list needs two or more different names, got {', '.join(self.class_list)}",
        )
        for name in ("class_values", "class_weights"):
            count = len(getattr(self, name))
            require(
                not (count and self.class_list) or count == len(self.class_list),
                f"{name} has {count} numbers and class_list {len(self.class_list)} names; give one"
                " for each",
            )
        require(
            all(weight > 0 for weight in self.class_weights), "class_weights must all be above 0"
        )
        require(
            self.down_sample is None or self.down_sample >= 1,
            f"down_sample must be at least 1 or null, got {self.down_sample}",
        )
        require(
            bool(self.step_separator),
            "step_separator must not be empty; the usual one is a line feed",
        )
        require(self.max_ranked > 1, f"max_ranked must be above 1, got {self.max_ranked}")
