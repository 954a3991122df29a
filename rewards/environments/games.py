"""Rows for the guessing game: `python -m rewards.environments.games --out DIR`.

A row has a prompt, a game as demonstration, and the columns `low` and `high` that the environment
reads. In a demonstration a guess agrees with the hints before it in a share of the cases, and is
any number of the range in the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from pipeline.cli import run_main, say
from pipeline.command import read_command
from pipeline.errors import require
from pipeline.files.output import json_lines, write_output
from pipeline.installation import MODULE
from rewards.environments.guessing import hint, question


@dataclass(frozen=True, kw_only=True)
class GamesConfig:
    """Which games are written, and where."""

    out: Path = Path("games")
    """Directory that receives train.jsonl and test.jsonl."""

    rows: int = 4000
    """Games; each range of numbers is in several."""

    held_out: int = 16
    """Ranges in test.jsonl, one game each, which no step trains on."""

    span: int = 8
    """Numbers of a range."""

    highest: int = 99
    """The largest number of any range."""

    sensible: float = 0.5
    """Share of the guesses that agree with the hints before them."""

    max_turns: int = 5
    """Guesses of a demonstration, at most."""

    seed: int = 0
    """Draws the games."""

    def __post_init__(self) -> None:
        require(self.span > 1, f"span must be above 1, got {self.span}")
        require(0 <= self.sensible <= 1, f"sensible must lie in [0, 1], got {self.sensible}")
        require(self.max_turns > 0, f"max_turns must be above 0, got {self.max_turns}")
        require(
            0 < self.held_out < self.num_ranges,
            f"held_out {self.held_out} leaves none to train on, of {self.num_ranges:,} ranges of"
            f" {self.span} numbers up to {self.highest}; lower it, or raise highest",
        )

    @property
    def num_ranges(self) -> int:
        """Ranges of numbers, by where they begin."""
        return self.highest - self.span + 1


def games(config: GamesConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to train on and rows held out, of other ranges."""
    random = Random(f"games of {config.span} numbers, seed {config.seed}")
    lows = random.sample(range(1, config.num_ranges + 1), config.num_ranges)
    held_out, others = lows[: config.held_out], lows[config.held_out :]
    rows = config.rows
    train = [_game(others[number % len(others)], random, config) for number in range(rows)]
    return train, [_game(low, random, config) for low in held_out]


def _game(low: int, random: Random, config: GamesConfig) -> dict[str, Any]:
    """A row; a game that is not found in `max_turns` guesses ends with the number all the same."""
    high = low + config.span - 1
    number = random.randint(low, high)
    least, most = low, high
    turns: list[dict[str, str]] = []
    for turn in range(config.max_turns):
        is_sensible = random.random() < config.sensible
        guess = random.randint(least, most) if is_sensible else random.randint(low, high)
        if turn == config.max_turns - 1:
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
    for name in ("train.jsonl", "test.jsonl"):
        path = config.out / name
        require(not path.exists(), f"{path} already exists; remove it or choose another --out")
    train, held_out = games(config)
    parts = {"train": train, "test": held_out}
    write_output(
        {config.out / f"{name}.jsonl": json_lines(part) for name, part in parts.items()},
        option="--out",
    )
    say(
        f"{len(train):,} games to train on and {len(held_out):,} held out in {config.out};"
        f" train.py --data-path {config.out} --config guessing-grpo.yaml plays them"
    )


if __name__ == "__main__":
    run_main(main)
