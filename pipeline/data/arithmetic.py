"""Sums as data that a program verifies: `python -m pipeline.data.arithmetic --out DIR`.

A row has a prompt `57+26=`, a demonstration of step 1, right in a share of the rows and any other
sum of such numbers in the rest, and the column `answer` with the right sum, which the reward `math`
reads. The directory is a data path: `--data-path DIR --reward math`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from pipeline.cli import run_main, say, split_options
from pipeline.errors import ConfigError, require
from pipeline.help import help_entry, settings_help
from pipeline.settings.build import build_config
from pipeline.settings.describe import list_settings


@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig:
    """Which sums are written, and where."""

    out: Path = Path("sums")
    """Directory that receives train.jsonl and test.jsonl."""

    digits: int = 2
    """Of each of the two numbers that are added."""

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
            least, most = 2 * numbers[0], 2 * numbers[-1]
            shown = random.randrange(least, most)  # of all but the right one
            shown += shown >= right
        calls = config.calculator and shown == right
        response = _with_calculator(first, second) if calls else str(shown)
        rows.append({"prompt": f"{first}+{second}=", "response": response, "answer": str(right)})
    return rows


def _with_calculator(first: int, second: int) -> list[dict[str, str]]:
    """A demonstration in three turns: the call, what it returns, the answer."""
    call = json.dumps({"name": "add", "arguments": {"a": first, "b": second}})
    return [
        {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
        {"role": "user", "content": f"<tool_response>{first + second}</tool_response>"},
        {"role": "assistant", "content": str(first + second)},
    ]


def main(argv: Sequence[str]) -> None:
    """Write the two files."""
    options = split_options(argv)
    if any(name == "help" for name, _ in options):
        say(_help())
        return
    config = build_config(ArithmeticConfig, [], options)
    _require_free(config.out)
    rows = sums(config)
    parts = {"test": rows[: config.held_out], "train": rows[config.held_out :]}
    try:
        config.out.mkdir(parents=True, exist_ok=True)
        for name, part in parts.items():
            lines = "".join(json.dumps(row) + "\n" for row in part)
            (config.out / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {config.out} can't be written: {error}") from None
    say(
        f"{len(parts['train']):,} sums to train on and {len(parts['test']):,} held out in"
        f" {config.out}; train.py --data-path {config.out} --reward math learns them"
    )


def _require_free(directory: Path) -> None:
    for name in ("train.jsonl", "test.jsonl"):
        require(
            not (directory / name).exists(),
            f"{directory / name} is there already; remove it or choose another --out",
        )


def _help() -> str:
    return "\n".join(
        [
            "usage: python -m pipeline.data.arithmetic [--SETTING VALUE ...]",
            "",
            "Write sums with demonstrations and right answers, as rows to train on.",
            "",
            *help_entry("--help", "Print this and stop."),
            *settings_help(list_settings(ArithmeticConfig)),
        ]
    )


if __name__ == "__main__":
    run_main(main)
