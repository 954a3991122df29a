"""Sums with demonstrations of mixed quality, and their right answers."""

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from pipeline.errors import require


@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig:
    """Which sums are written, and where."""

    out: Path = Path("sums")
    """Directory that receives train.jsonl and test.jsonl."""

    model: Path | None = None
    """Directory that receives a base model for sums, a Llama of 310,000 random weights; the
    embedded one, three times as large, learns them more slowly."""

    digits: int = 2
    """Digits of each of the two numbers that are added."""

    rows: int = 8100
    """Different sums, at most; of numbers of two digits there are 8,100."""

    held_out: int = 512
    """Of them, those in test.jsonl, which no step trains on."""

    right: float = 0.5
    """Share of the demonstrations that are right."""

    calculator: bool = False
    """Have right demonstrations call the tool `add` of the environment calculator, and answer with
    what it returns."""

    seed: int = 0
    """Draws the sums and their demonstrations."""

    def __post_init__(self) -> None:
        require(0 < self.digits < 10, f"digits must lie between 1 and 9, got {self.digits}")
        require(0 <= self.right <= 1, f"right must lie between 0 and 1, got {self.right}")
        require(
            0 < self.held_out < min(self.rows, self.num_sums),
            f"held_out {self.held_out} leaves none to train on, of rows {self.rows} and"
            f" {self.num_sums:,} sums of numbers with {self.digits} digits; lower it",
        )

    @property
    def numbers(self) -> range:
        """What is added: of one digit 1 to 9."""
        return range(10 ** (self.digits - 1), 10**self.digits)

    @property
    def num_sums(self) -> int:
        """Ordered pairs of numbers."""
        return len(self.numbers) ** 2


def sums(config: ArithmeticConfig) -> list[dict[str, Any]]:
    """The rows, in random order; each sum once."""
    random = Random(f"sums of {config.digits} digits, seed {config.seed}")
    numbers = config.numbers
    count = min(config.rows, config.num_sums)
    rows: list[dict[str, Any]] = []
    for place in random.sample(range(config.num_sums), count):
        first, second = (numbers[index] for index in divmod(place, len(numbers)))
        right = first + second
        shown = right
        if random.random() >= config.right:
            shown = _with_a_wrong_digit(right, random)
        calls = config.calculator and shown == right
        response = _with_calculator(first, second) if calls else str(shown)
        rows.append({"prompt": f"{first}+{second}=", "response": response, "answer": str(right)})
    return rows


def _with_a_wrong_digit(number: int, random: Random) -> int:
    """A number as long, with another digit at one place; a first digit other than 0.

    Most digits of wrong demonstrations are right, so that a small model learns sums from a mixture.
    """
    digits = str(number)
    place = random.randrange(len(digits))
    others = [d for d in "0123456789" if d != digits[place] and (place > 0 or d != "0")]
    return int(digits[:place] + random.choice(others) + digits[place + 1 :])


def _with_calculator(first: int, second: int) -> list[dict[str, str]]:
    """A demonstration in three turns: the call, what it returns, the answer."""
    call = json.dumps({"name": "add", "arguments": {"a": first, "b": second}})
    return [
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "user", "content": f"<tool_response>{first + second}</tool_response>"},
        {"role": "assistant", "content": str(first + second)},
    ]
