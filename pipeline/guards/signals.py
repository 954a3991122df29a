"""What guards need to know of a step's metrics."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from pipeline.guards.settings import Guard

Metrics = Mapping[str, float]


class Signals(ABC):
    """The signals of a step: what they are in numbers, and what each says of a run."""

    OF_THE_START: ClassVar[Sequence[str]]
    """Metrics as the run begins that later ones are compared with."""

    OF_TRENDS: ClassVar[Sequence[str]] = ()
    """Metrics whose course over some checks counts."""

    UNIT: ClassVar[str]
    """What a run's steps are called: iteration, step."""

    SLOWER: ClassVar[str]
    """What a rollback changes, in words."""

    @abstractmethod
    def value_of(self, signal: str, metrics: Metrics, first: Metrics) -> float | None:
        """The signal in the unit of its limit; None where it was not measured.

        Args:
            signal: none of a trend, which is not a number of one check.
            metrics: as they are now.
            first: `OF_THE_START`.
        """

    def shows_trend(self, guard: Guard, history: Sequence[Metrics]) -> bool:
        """Whether a signal of a trend is beyond its limit; most steps have no trends."""
        del guard, history
        return False

    @abstractmethod
    def sentence_of(
        self, guard: Guard, metrics: Metrics, first: Metrics, history: Sequence[Metrics]
    ) -> str:
        """What is out of order, and what may help.

        Args:
            guard: whose signal is beyond its limit.
            metrics: as they are now.
            first: `OF_THE_START`.
            history: the last checks, where the guard watches a trend.
        """


def percent(share: float) -> str:
    """`12 %`."""
    return f"{100 * share:.0f} %"
