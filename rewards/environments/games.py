"""A number-guessing game with hints: `--environment guessing`.

Rows, as `scripts/guessing_rows.py` writes, have the range `low` to `high` of the number.
"""

import re
from collections.abc import Mapping
from random import Random
from typing import Any

from pipeline.data.examples import Message

COST = 0.1
"""Cost of a wrong guess, subtracted from the reward for finding the number."""

SENSIBLE = 0.5
"""Weight of the fraction of guesses that are consistent with earlier hints."""


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

    def step(self, response: str) -> list[Message] | None:
        """Return a hint; a response without a number counts as a wrong guess."""
        digits = re.fullmatch(r"\s*(\d{1,9})\s*", response)
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
        """Rewards for finding the number, less a cost per wrong guess, and for consistency."""
        found = max(0.0, 1.0 - COST * self.wrong) if self.found else 0.0
        guesses = self.wrong + self.found
        share = self.sensible / guesses if guesses else 0.0
        return {"found": found, "sensible": SENSIBLE * share}


def question(low: int, high: int) -> str:
    """The opening message."""
    return f"Guess my number: {low} to {high}."


def hint(guess: int | None, number: int) -> str:
    """The reply to a wrong guess."""
    if guess is None:
        return "a number, please"
    return "higher" if number > guess else "lower"
