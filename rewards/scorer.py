"""What a worker process holds of a source: a function from episodes to outcomes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rewards.contract import Episode, Outcome
from rewards.results import of_error, outcome_of


@dataclass(frozen=True)
class Scorer:
    """Scores episodes. It may raise; then all episodes of the call have failed."""

    score: Callable[[Sequence[Episode]], list[Outcome]]

    batched: bool = False
    """Whether all episodes that are submitted together go into one call, and not each into one."""


def one_by_one(score: Callable[[Episode], float | None]) -> Scorer:
    """A scorer of single episodes; what `score` raises fails its episode."""

    def outcome(episode: Episode) -> Outcome:
        try:
            return outcome_of(score(episode))
        except Exception as error:  # noqa: BLE001 - a failure is reported, whatever it is
            return of_error(error, 1)[0]

    return Scorer(lambda episodes: [outcome(each) for each in episodes])
