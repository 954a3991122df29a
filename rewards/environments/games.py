"""A number-guessing game with hints: `--environment guessing`.

`python -m rewards.environments.games --out DIR` writes rows for it. A row has a prompt, a game as
demonstration, and the columns `low` and `high`, the range of the number; in training the seed
chooses the number. In a demonstration half of the guesses are consistent with earlier hints; the
others are random.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from pipeline.cli.options import read_command, run_main, say
from pipeline.data.examples import Message
from pipeline.files.durable import json_lines, write_output
from pipeline.system.errors import require
from pipeline.system.installation import MODULE

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
        """Rewards for finding the number and for consistent guesses, minus a cost per guess."""
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


SPAN = 8
"""Size of a range of numbers."""

LOWS = range(1, 93)
"""First numbers of the ranges."""

HELD_OUT = 16
"""Ranges in test.jsonl, one game each, on which no step trains."""

MAX_TURNS = 5
"""Maximum guesses per demonstration."""


@dataclass(frozen=True, kw_only=True)
class GamesConfig:
    """The games to write."""

    out: Path = Path("games")
    """Directory for train.jsonl and test.jsonl."""

    rows: int = 4000
    """Number of games; each range of numbers is used in several."""

    seed: int = 0
    """Seed of the games."""


def games(config: GamesConfig) -> dict[str, list[dict[str, Any]]]:
    """Training rows, and held-out rows with other ranges, by file name."""
    random = Random(f"games of {SPAN} numbers, seed {config.seed}")
    lows = random.sample(LOWS, len(LOWS))
    held_out, others = lows[:HELD_OUT], lows[HELD_OUT:]
    train = [_game(others[number % len(others)], random) for number in range(config.rows)]
    return {"train.jsonl": train, "test.jsonl": [_game(low, random) for low in held_out]}


def _game(low: int, random: Random) -> dict[str, Any]:
    """A row; a game that is not won within `MAX_TURNS` guesses ends with the number."""
    high = low + SPAN - 1
    number = random.randint(low, high)
    least, most = low, high
    turns: list[dict[str, str]] = []
    for turn in range(MAX_TURNS):
        is_sensible = random.random() < 0.5
        guess = random.randint(least, most) if is_sensible else random.randint(low, high)
        if turn == MAX_TURNS - 1:
            guess = number
        turns.append({"role": "assistant", "content": str(guess)})
        if guess == number:
            break
        turns.append({"role": "user", "content": hint(guess, number)})
        if guess < number:
            least = max(least, guess + 1)
        else:
            most = min(most, guess - 1)
    return {"prompt": question(low, high), "response": turns, "low": low, "high": high}


def main(argv: Sequence[str]) -> None:
    """Write the two files."""
    config = read_command(
        GamesConfig,
        argv,
        usage=f"{MODULE} rewards.environments.games [--SETTING VALUE ...]",
        about="Write guessing games as rows to train on.",
    )
    files = {config.out / name: rows for name, rows in games(config).items()}
    for path in files:
        require(not path.exists(), f"{path} already exists; remove it or choose another --out")
    write_output({path: json_lines(rows) for path, rows in files.items()}, option="--out")
    counts = " and ".join(f"{len(rows):,} games in {path}" for path, rows in files.items())
    say(f"{counts}; train.py --data-path {config.out} --config guessing-grpo.yaml plays them")


if __name__ == "__main__":
    run_main(main)
