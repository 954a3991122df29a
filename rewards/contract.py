"""What a source of rewards reads and gives.

None and failure are two things: a source says None where it does not apply to a row, and a failure
has a sentence. Neither is ever counted as 0.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.data.examples import Message
from pipeline.errors import UserError


@dataclass(frozen=True)
class Episode:
    """A response to judge, and what is known about its prompt."""

    prompt: tuple[Message, ...]
    """The dialogue that was answered; empty for plain text."""

    response: str
    """In an environment, the last answer."""

    turns: tuple[Message, ...] = ()
    """In an environment, the turns between `prompt` and `response`: the earlier answers, and what
    followed them."""

    extra: Mapping[str, Any] = field(default_factory=dict)
    """Columns of the row: answer, label, tests, ..."""

    stopped: bool = True
    """Whether the response ended by itself, and not by its limit of tokens."""

    num_tokens: int = 0
    """Tokens of the response; in an environment those of all answers."""

    slot: int = 0
    """Its place in the rollout; results are ordered by it."""


RewardFunction = Callable[
    [Sequence[Episode]], Sequence[float | None] | Awaitable[Sequence[float | None]]
]
"""A user's function: one number for each episode, or None where it does not apply."""


@dataclass(frozen=True)
class Outcome:
    """What one source gives for one episode."""

    value: float | None = None
    """None where the source does not apply, or failed."""

    failure: str | None = None
    """A sentence, where it failed."""

    @classmethod
    def failed(cls, sentence: str) -> "Outcome":
        """A failure, described in one line of moderate length."""
        return cls(None, " ".join(sentence.split())[:500])


@dataclass(frozen=True)
class Scored:
    """What one source gives for all episodes, in their order."""

    values: list[float | None]
    """None: does not apply, or failed."""

    failed: list[str | None]
    """A sentence where it failed."""

    @property
    def num_failed(self) -> int:
        """Episodes that it failed on."""
        return sum(sentence is not None for sentence in self.failed)

    @property
    def first_failure(self) -> str | None:
        """The sentence of the first of them."""
        return next((sentence for sentence in self.failed if sentence is not None), None)


@dataclass(frozen=True)
class Verdicts:
    """The rewards of all episodes that were submitted together, ordered by slot."""

    slots: list[int]

    sources: Mapping[str, Scored]
    """By name, in the order of the settings."""

    gold: Scored | None
    """What is measured and never trained on."""

    seconds: Mapping[str, float]
    """By source (and `gold`): the time its calls took, added up over the worker processes."""


class RewardError(UserError):
    """A source of rewards failed on more responses than the settings allow, or can't run."""
