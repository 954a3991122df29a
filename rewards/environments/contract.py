"""What an environment is, what it gives of an episode, and the messages between its processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.data.examples import Message
from rewards.contract import Outcome

VERBS = ("reset", "step", "reward")
"""The methods of an environment."""


class Environment(Protocol):
    """A dialogue's other side: one object for each episode.

    Messages are `pipeline.data.examples.Message` or mappings with `role` and `content`. What a
    method raises fails its episode, which then teaches nothing. Given the same row, seed and
    answers, an environment says the same: so runs resume exactly, and an episode whose process was
    lost with another's is played again up to where it was.
    """

    def reset(self, row: Mapping[str, Any], *, seed: int) -> Sequence[Message]:
        """The opening messages, of which the last is the user's.

        Args:
            row: the columns of the data's row, and under `dialogue` its prompt as messages.
            seed: the same for all episodes of a group, another one for any other.
        """
        ...

    def step(self, answer: str) -> Sequence[Message] | None:
        """What follows an answer, of the user or the system; None ends the episode."""
        ...

    def reward(self) -> float | Mapping[str, float] | None:
        """What the episode is worth, at its end, also where a limit ended it.

        Of a mapping the sum counts and each part is measured; None says that there is no reward.
        """
        ...


@dataclass(frozen=True)
class Verdict:
    """What an environment's `reward` gave."""

    outcome: Outcome
    parts: Mapping[str, float] = field(default_factory=dict)
    """Of a reward that has several; the outcome is their sum."""
