"""Sums as data that a program verifies: `python -m pipeline.data.arithmetic --out DIR`.

A row has a prompt `57+26=`, a demonstration of step 1, right in a share of the rows and any other
sum of such numbers in the rest, and the column `answer` with the right sum, which the reward `math`
reads. The directory is a data path: `--data-path DIR --reward math`.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from pipeline.cli import run_main, say, split_options
from pipeline.data.sums import ArithmeticConfig, sums
from pipeline.errors import ConfigError, require
from pipeline.help import help_entry, settings_help
from pipeline.settings.build import build_config
from pipeline.settings.describe import list_settings


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
