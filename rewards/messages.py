"""What the training process, the supervisor and the workers send each other.

Classes of a module that a process runs as its program would be other ones at the other end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rewards.contract import Episode, Outcome
from rewards.sources import Source


@dataclass(frozen=True)
class Setup:
    """What the training process says first."""

    sources: Sequence[Source]
    workers: int


@dataclass(frozen=True)
class Opened:
    """The reply to it: sources that can't be loaded, by name."""

    errors: Mapping[str, str]


@dataclass(frozen=True)
class Submission:
    """Episodes for every source."""

    episodes: Sequence[Episode]


@dataclass(frozen=True)
class Collect:
    """Asks for the outcomes of all episodes that were submitted since the last such message."""


@dataclass(frozen=True)
class Collected:
    """The reply to it."""

    outcomes: list[list[Outcome]]
    """For each source, its outcome of each episode, in the order of submission."""

    seconds: list[float]
    """By source, the time of its calls."""


@dataclass(frozen=True)
class Call:
    """Episodes that one source scores in one go."""

    number: int
    source: int
    """Its place in the list of sources."""

    episodes: Sequence[Episode]


@dataclass(frozen=True)
class Answer:
    """What came of a call."""

    number: int
    outcomes: list[Outcome]
    seconds: float


@dataclass(frozen=True)
class Ready:
    """What a worker says once it has loaded its sources."""

    batched: dict[int, bool]
    """By source, whether it takes several episodes in a call."""

    errors: dict[int, str]
    """Sources that can't be loaded."""
