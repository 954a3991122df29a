"""Sums as verifiable data: `python -m pipeline.demo.arithmetic --out DIR`.

Each row has a prompt such as `57+26=`, a demonstration (correct in half of the rows, with one wrong
digit in the others), and the column `answer`, which the reward `math` reads. The directory is a
data path: `--data-path DIR --reward math`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from pipeline.cli.options import parse_command, print_output, run_main
from pipeline.files.durable import json_lines, write_output
from pipeline.system.errors import require
from pipeline.system.installation import MODULE

HELD_OUT = 512
"""Number of rows in test.jsonl, on which no step trains."""


@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig:
    """Settings for generating sums."""

    out: Path = Path("sums")
    """Directory for train.jsonl and test.jsonl."""

    model: Path | None = None
    """Directory for a base model for sums, a Llama with 310,000 random weights; the embedded model,
    which is three times as large, learns sums more slowly."""

    calculator: bool = False
    """Whether correct demonstrations answer with the result of the calculator's tool `add`."""

    seed: int = 0
    """Seed of the sums and their demonstrations."""


def make_sums(config: ArithmeticConfig) -> list[dict[str, Any]]:
    """Return all 8,100 sums of two two-digit numbers, in random order."""
    random = Random(f"sums of 2 digits, seed {config.seed}")
    rows: list[dict[str, Any]] = []
    for first, second in random.sample(list(product(range(10, 100), repeat=2)), 8100):
        answer = response_sum = first + second
        if random.random() >= 0.5:
            response_sum = _change_digit(answer, random)
        response: Any = str(response_sum)
        if config.calculator and response_sum == answer:  # the call, its result, the answer
            call = json.dumps({"name": "add", "arguments": {"a": first, "b": second}})
            response = [
                {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
                {"role": "user", "content": f"<tool_response>{answer}</tool_response>"},
                {"role": "assistant", "content": str(answer)},
            ]
        rows.append({"prompt": f"{first}+{second}=", "response": response, "answer": str(answer)})
    return rows


def _change_digit(number: int, random: Random) -> int:
    """Change one digit of the number, so that a small model still learns from the other digits."""
    digits = str(number)
    position = random.randrange(len(digits))
    others = [d for d in "0123456789" if d != digits[position] and (position > 0 or d != "0")]
    return int(digits[:position] + random.choice(others) + digits[position + 1 :])


def main(argv: Sequence[str]) -> None:
    """Write the two files, and the model if one is requested."""
    config = parse_command(
        ArithmeticConfig,
        argv,
        usage=f"{MODULE} pipeline.demo.arithmetic [--SETTING VALUE ...]",
        about="Write sums with demonstrations and correct answers, as rows to train on.",
    )
    files = {name: config.out / f"{name}.jsonl" for name in ("train", "test")}
    for path in (*files.values(), *([config.model] if config.model else [])):
        require(not path.exists(), f"{path} already exists; remove it or choose another path")
    rows = make_sums(config)
    test, train = rows[:HELD_OUT], rows[HELD_OUT:]
    if config.model is not None:
        from pipeline.demo.model import build_model, build_tokenizer  # imports torch

        tokenizer = build_tokenizer()
        # With tied embeddings, learning sums takes much longer.
        model = build_model(
            vocab_size=len(tokenizer), seed=config.seed, hidden_size=64, num_layers=3, tied=False
        )
        model.save_pretrained(config.model)
        tokenizer.save_pretrained(config.model)
    content = {files["train"]: json_lines(train), files["test"]: json_lines(test)}
    write_output(content, option="--out")
    print_output(
        f"wrote {len(train):,} sums for training and {len(test):,} for evaluation to {config.out};"
        f" train on them with train.py --data-path {config.out} --reward math"
    )


if __name__ == "__main__":
    run_main(main)
