"""Figures of predicted steps: each by itself, and whether the first error is found."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PredictedSteps:
    """The labelled steps of a response."""

    targets: tuple[float, ...]
    """How right each is, from 0 to 1; right from a half on."""

    logits: tuple[float, ...]
    """The model's log-odds that it is."""

    @property
    def first_error(self) -> int | None:
        """The place of the first wrong step; None where all are right."""
        return next((place for place, each in enumerate(self.targets) if each < 0.5), None)

    @property
    def first_found(self) -> int | None:
        """The place of the first step that the model takes for wrong."""
        return next((place for place, each in enumerate(self.logits) if each <= 0), None)


@dataclass(frozen=True)
class FirstErrors:
    """ProcessBench's figures (Zheng et al. 2024, 2412.06559, section 3)."""

    with_error: int
    """Responses with a wrong step."""
    found: int
    """Of these, where the first step that is taken for wrong is the first wrong one."""
    without_error: int
    kept: int
    """Of these, where no step is taken for wrong."""

    @property
    def accuracy(self) -> float:
        """The share of all responses of which both agree."""
        return (self.found + self.kept) / max(1, self.with_error + self.without_error)

    @property
    def f1(self) -> float | None:
        """Harmonic mean of both shares; None where a kind of response is not there."""
        if not self.with_error or not self.without_error:
            return None
        found, kept = self.found / self.with_error, self.kept / self.without_error
        return 2 * found * kept / (found + kept) if found + kept else 0.0


def first_errors(rows: Sequence[PredictedSteps]) -> FirstErrors:
    """How often the first error of a response is found, over those with labelled steps."""
    labelled = [row for row in rows if row.targets]
    wrong = [row for row in labelled if row.first_error is not None]
    right = [row for row in labelled if row.first_error is None]
    return FirstErrors(
        with_error=len(wrong),
        found=sum(row.first_found == row.first_error for row in wrong),
        without_error=len(right),
        kept=sum(row.first_found is None for row in right),
    )


def step_figures(rows: Sequence[PredictedSteps]) -> dict[str, float]:
    """Steps that are predicted right, those of wrong and right steps alike, and first errors."""
    pairs = [pair for row in rows for pair in zip(row.targets, row.logits, strict=True)]
    by_kind = {
        is_right: [logit for target, logit in pairs if (target >= 0.5) == is_right]
        for is_right in (True, False)
    }
    hits = {kind: sum((each > 0) == kind for each in found) for kind, found in by_kind.items()}
    shares = [hits[kind] / len(found) for kind, found in by_kind.items() if found]
    errors = first_errors(rows)
    figures = {
        "accuracy": sum(hits.values()) / max(1, len(pairs)),
        "macro_recall": sum(shares) / max(1, len(shares)),
        "first_error_accuracy": errors.accuracy,
    }
    return figures if errors.f1 is None else {**figures, "first_error_f1": errors.f1}
