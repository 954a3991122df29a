"""Sums with demonstrations of mixed quality, and their right answers."""

from dataclasses import dataclass
from pathlib import Path
from random import Random

from pipeline.errors import require


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


def sums(config: ArithmeticConfig) -> list[dict[str, str]]:
    """The rows, in random order; each sum once."""
    random = Random(f"sums of {config.digits} digits, seed {config.seed}")
    numbers = config.numbers
    count = min(config.rows, config.num_sums)
    rows = []
    for place in random.sample(range(config.num_sums), count):
        first, second = (numbers[index] for index in divmod(place, len(numbers)))
        right = first + second
        shown = right
        if random.random() >= config.right:
            least, most = 2 * numbers[0], 2 * numbers[-1]
            shown = random.randrange(least, most)  # of all but the right one
            shown += shown >= right
        rows.append({"prompt": f"{first}+{second}=", "response": str(shown), "answer": str(right)})
    return rows
