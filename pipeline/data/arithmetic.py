"""Sums as data that a program verifies: `python -m pipeline.data.arithmetic --out DIR`.

A row has a prompt `57+26=`, a demonstration of step 1, right in a share of the rows and with
one wrong digit in the rest, and the column `answer` with the right sum, which the reward `math`
reads. The directory is a data path: `--data-path DIR --reward math`.
"""

from collections.abc import Sequence
from pathlib import Path

from pipeline.cli import run_main, say
from pipeline.command import read_command
from pipeline.data.sums import ArithmeticConfig, sums
from pipeline.errors import require
from pipeline.files.output import json_lines, write_output
from pipeline.installation import MODULE


def main(argv: Sequence[str]) -> None:
    """Write the two files."""
    config = read_command(
        ArithmeticConfig,
        argv,
        usage=f"{MODULE} pipeline.data.arithmetic [--SETTING VALUE ...]",
        about="Write sums with demonstrations and right answers, as rows to train on.",
    )
    _require_free(config.out)
    rows = sums(config)
    parts = {"test": rows[: config.held_out], "train": rows[config.held_out :]}
    if config.model is not None:
        _write_model(config.model, seed=config.seed)
    write_output(
        {config.out / f"{name}.jsonl": json_lines(part) for name, part in parts.items()},
        option="--out",
    )
    say(
        f"{len(parts['train']):,} sums to train on and {len(parts['test']):,} held out in"
        f" {config.out}; train.py --data-path {config.out} --reward math learns them"
    )


def _write_model(directory: Path, *, seed: int) -> None:
    """A base model narrow enough to learn sums on a laptop.

    A digit that is read and a digit that is written have vectors of their own: where one vector is
    both, sums are learned much later, with some seeds above all.
    """
    from pipeline.models.embedded import build_model, build_tokenizer  # loads torch

    require(
        not directory.exists(), f"{directory} already exists; remove it or choose another --model"
    )
    tokenizer = build_tokenizer()
    model = build_model(
        vocab_size=len(tokenizer), seed=seed, hidden_size=64, num_layers=3, tied=False
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _require_free(directory: Path) -> None:
    for name in ("train.jsonl", "test.jsonl"):
        require(
            not (directory / name).exists(),
            f"{directory / name} already exists; remove it or choose another --out",
        )


if __name__ == "__main__":
    run_main(main)
