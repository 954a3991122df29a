"""What the training process, the supervisor and the workers of environments send each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.data.examples import Message
from rewards.environments.contract import Verdict
from rewards.environments.file import EnvironmentFile


@dataclass(frozen=True)
class Stage:
    """What the training process says first."""

    file: EnvironmentFile
    workers: int
    timeout_seconds: float


@dataclass(frozen=True)
class Move:
    """What an episode's environment is to do next."""

    episode: int
    verb: Literal["reset", "step", "reward"]

    row: Mapping[str, Any] | None = None
    """For reset: the row that the episode begins from; `seed` goes with it."""

    seed: int = 0

    answer: str = ""
    """For step: the actor's newest turn."""


@dataclass(frozen=True)
class Play:
    """A move for a worker, with all that came before it."""

    episode: int
    verb: Literal["reset", "step", "reward"]
    row: Mapping[str, Any]
    seed: int

    answers: tuple[str, ...]
    """Of the episode so far, in `step` the newest included."""


@dataclass(frozen=True)
class Played:
    """What came of a move."""

    episode: int

    messages: tuple[Message, ...] | None = None
    """What reset or step returned; None where the episode has ended."""

    failure: str | None = None
    """A sentence, where the environment failed: it plays this episode no further."""

    verdict: Verdict | None = None
    """What reward returned."""


@dataclass(frozen=True)
class Loaded:
    """What a worker says once it has loaded the class, and the supervisor once all have."""

    error: str | None = None
    """Why it can't be."""
