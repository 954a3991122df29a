"""Write games of docs/environments.md: `python scripts/guessing_rows.py OUT [NUMBER]`.

A row has a prompt, a game as demonstration, and the range of the number. In a demonstration half of
the guesses are consistent with earlier hints; the others are random.
"""

import json
import sys
from pathlib import Path
from random import Random
from typing import Any

from rewards.environments.games import hint, question

SPAN = 8
"""Size of a range of numbers."""

LOWS = range(1, 93)
"""First numbers of the ranges."""

HELD_OUT = 16
"""Ranges in test.jsonl, one game each, on which no step trains."""

MAX_TURNS = 5
"""Maximum guesses per demonstration."""


def game(low: int, random: Random) -> dict[str, Any]:
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


def main(out: Path, number: int = 4000) -> None:
    """Write training rows, and held-out rows with other ranges."""
    random = Random(f"games of {SPAN} numbers, seed 0")
    lows = random.sample(LOWS, len(LOWS))
    held_out, others = lows[:HELD_OUT], lows[HELD_OUT:]
    train = [game(others[index % len(others)], random) for index in range(number)]
    out.mkdir(parents=True)
    for name, rows in {"train": train, "test": [game(low, random) for low in held_out]}.items():
        lines = (f"{json.dumps(row)}\n" for row in rows)
        (out / f"{name}.jsonl").write_text("".join(lines))
        print(f"{len(rows):,} games in {out / name}.jsonl")


if __name__ == "__main__":
    _, out, *number = sys.argv
    main(Path(out), *map(int, number))
