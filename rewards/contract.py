"""What a source of rewards reads and gives.

None and failure are two things: a source says None where it does not apply to a row, and a failure
has a sentence. Neither is ever counted as 0.
"""

import math
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


def outcomes_of(returned: object, count: int) -> list[Outcome]:
    """One outcome for each of `count` episodes from what a function returned for them.

    A wrong number of results fails all of them, since none can be matched to a response; a result
    that is neither a finite number nor None fails its episode alone.
    """
    if isinstance(returned, str | bytes | Mapping) or not hasattr(returned, "__iter__"):
        return everywhere(f"it returned {_described(returned)}, not a list of numbers", count)
    results = list(returned)  # type: ignore[call-overload]
    if len(results) != count:
        return everywhere(f"it returned {len(results)} results for {count} responses", count)
    return [outcome_of(result) for result in results]


def outcome_of(result: object) -> Outcome:
    """A finite number (also of NumPy, or a tensor of one element), or None."""
    if result is None:
        return Outcome()
    if isinstance(result, str | bytes) or not hasattr(result, "__float__"):
        return Outcome.failed(f"it gave {_described(result)} where a number or None belongs")
    try:
        number = float(result)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        return Outcome.failed(f"it gave {_described(result)}, which is not a number: {error}")
    if not math.isfinite(number):
        return Outcome.failed(f"it gave {number}, which is not finite")
    return Outcome(number)


def everywhere(sentence: str, count: int) -> list[Outcome]:
    """The same failure for all episodes of a call."""
    return [Outcome.failed(sentence)] * count


def of_error(error: BaseException, count: int) -> list[Outcome]:
    """The failure of all episodes of a call that raised."""
    return everywhere(f"it raised {type(error).__name__}: {error}", count)


def member(returned: object, names: Sequence[str]) -> Any:  # noqa: ANN401
    """What a mapping holds under the first of `names` that it has; other things as they are."""
    if isinstance(returned, Mapping):
        return next((returned[name] for name in names if name in returned), returned)
    return returned


def _described(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


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
