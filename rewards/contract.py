"""The input and output of reward sources.

None is not a failure: a source returns None if it does not apply to a row, while a failure has a
message. Neither counts as 0.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.data.examples import Message


@dataclass(frozen=True)
class Episode:
    """A response to score, its prompt, and its row."""

    prompt: tuple[Message, ...]
    """The dialogue that the response answers; empty for plain text."""

    response: str
    """The response; in an environment, the last one."""

    turns: tuple[Message, ...] = ()
    """In an environment, the turns between `prompt` and `response`: earlier responses and
    observations."""

    extra: Mapping[str, Any] = field(default_factory=dict)
    """Columns of the row: answer, label, tests, ..."""

    stopped: bool = True
    """Whether the response ended with an end token rather than at the token limit."""

    num_tokens: int = 0
    """Number of tokens in the response; in an environment, in all responses."""

    slot: int = 0
    """Index in the rollout, by which results are sorted."""


@dataclass(frozen=True)
class Outcome:
    """Result of one source for one episode."""

    value: float | None = None
    """The reward; None if the source does not apply or failed."""

    failure: str | None = None
    """Error message; None if the source did not fail."""

    @classmethod
    def failed(cls, message: str) -> "Outcome":
        """Return a failure whose message is one line of at most 500 characters."""
        return cls(None, " ".join(message.split())[:500])


@dataclass(frozen=True)
class SourceResults:
    """Results of one source for all episodes, in the order of the episodes."""

    values: list[float | None]
    """Reward of each episode; None if the source does not apply or failed."""

    failures: list[str | None]
    """Error message of each episode; None if the source did not fail."""

    @property
    def num_failed(self) -> int:
        """Number of episodes on which the source failed."""
        return sum(message is not None for message in self.failures)

    @property
    def first_failure(self) -> str | None:
        """The message of the first failure."""
        return next((message for message in self.failures if message is not None), None)


def parse_outcomes(returned: object, count: int) -> list[Outcome]:
    """Convert a function's return value to one outcome for each of `count` episodes.

    If the number of results is wrong, every outcome is a failure, since results can't be matched to
    episodes. A result that is neither a finite number nor None fails only its own episode.
    """
    unordered = isinstance(returned, str | bytes | Mapping | set | frozenset)
    if unordered or not hasattr(returned, "__iter__"):
        return fail_all(f"it returned {describe_value(returned)}, not a list of numbers", count)
    results = list(returned)  # type: ignore[call-overload]
    if len(results) != count:
        return fail_all(f"it returned {len(results)} results for {count} responses", count)
    return [parse_outcome(result) for result in results]


def parse_outcome(result: object) -> Outcome:
    """Convert one result: None or a finite number (also a NumPy scalar or one-element tensor)."""
    if result is None:
        return Outcome()
    if isinstance(result, str | bytes) or not hasattr(result, "__float__"):
        return Outcome.failed(f"it returned {describe_value(result)} instead of a number or None")
    try:
        number = float(result.detach() if hasattr(result, "detach") else result)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        return Outcome.failed(
            f"it returned {describe_value(result)}, which is not a number: {error}"
        )
    if not abs(number) < 2.0**128:  # also NaN
        return Outcome.failed(f"it returned {number}, which is not finite in fp32")
    return Outcome(number)


def single_answer(value: object) -> object:
    """Return the answer in a column, unwrapping a list with a single item.

    Raises:
        TypeError: the answer is an object or a longer list, which can't be compared.
    """
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, list | tuple | Mapping):
        got = describe_value(value)
        raise TypeError(f"the row's answer must be a single value, got {got}; use another column")
    return value


def fail_all(message: str, count: int) -> list[Outcome]:
    """Return the same failure for all episodes of a call."""
    return [Outcome.failed(message)] * count


def describe_value(value: object) -> str:
    """Return the type and the truncated repr of a value, for error messages."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


Scorer = Callable[[Sequence[Episode]], list[Outcome]]
"""Scores the episodes of a call; an exception fails all of them."""


def per_episode_scorer(score: Callable[[Episode], float | None]) -> Scorer:
    """Make a scorer from a function that scores one episode."""
    return lambda episodes: [parse_outcome(score(episode)) for episode in episodes]
