"""A number to guess, with hints: `--environment guessing`.

`python -m rewards.environments.games` writes rows for it. A row may have the columns `low` and
`high`, between which the number lies; the seed chooses it.
"""

import re
from collections.abc import Mapping
from random import Random
from typing import Any

from pipeline.data.examples import Message

COST = 0.1
"""What each wrong guess takes off the reward of a number that is found."""

SENSIBLE = 0.5
"""What the share of guesses that agree with all hints before them weighs."""


class GuessingGame:
    """Answers a guess with `higher` or `lower`, until it is right."""

    def reset(self, row: Mapping[str, Any], *, seed: int) -> list[Message]:
        """Choose a number and ask for it."""
        self.low, self.high = int(row.get("low", 1)), int(row.get("high", 20))
        self.number = Random(seed).randint(self.low, self.high)
        self.least, self.most = self.low, self.high
        self.wrong = self.sensible = 0
        self.found = False
        return [Message("user", question(self.low, self.high))]

    def step(self, answer: str) -> list[Message] | None:
        """Say where the number lies; an answer that is none counts as a wrong one."""
        digits = re.fullmatch(r"\s*(\d{1,9})\s*", answer)
        guess = int(digits[1]) if digits else None
        if guess is not None:
            self.sensible += self.least <= guess <= self.most
            if guess < self.number:
                self.least = max(self.least, guess + 1)
            else:
                self.most = min(self.most, guess - 1)
        if guess == self.number:
            self.found = True
            return None
        self.wrong += 1
        return [Message("user", hint(guess, self.number))]

    def reward(self) -> dict[str, float]:
        """What finding the number is worth, less its cost, and how sensible the guesses were."""
        found = max(0.0, 1.0 - COST * self.wrong) if self.found else 0.0
        guesses = self.wrong + self.found
        share = self.sensible / guesses if guesses else 0.0
        return {"found": found, "sensible": SENSIBLE * share}


def question(low: int, high: int) -> str:
    """The opening."""
    return f"Guess my number: {low} to {high}."


def hint(guess: int | None, number: int) -> str:
    """What follows a guess that is not right."""
    if guess is None:
        return "a number, please"
    return "higher" if number > guess else "lower"
