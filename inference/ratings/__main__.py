"""Ratings as data: `python -m inference.ratings export|merge|agreement FILE ...`."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from inference.ratings.agreement import Agreement, agreement
from inference.ratings.export import as_lines, export, merge
from inference.ratings.file import read_ratings, standing_ratings
from pipeline.cli import run_main, say
from pipeline.errors import DataError
from pipeline.files.output import check_output, write_output
from pipeline.installation import MODULE


def main(argv: Sequence[str]) -> None:
    """Do what the first word says.

    Raises:
        UserError: a file can't be read or written, or holds something else than ratings.
    """
    options = _parse(argv)
    files = [read_ratings(path) for path in options.files]
    if options.command == "agreement":
        say("\n".join(table(agreement(standing_ratings(merge(files))))))
        return
    check_output(options.out, option="--out")
    if options.command == "merge":
        ratings = merge(files)
        write_output({options.out: as_lines(ratings)}, option="--out")
        say(f"{options.out}: {len(ratings)} lines")
        return
    found = export(standing_ratings(merge(files)), options.format)
    if not found.rows:
        raise DataError(f"no rating prefers a response: {', '.join(map(str, options.files))}")
    write_output({options.out: as_lines(found.rows)}, option="--out")
    undecided = (
        f"; {found.undecided} pairs without a preference left out" if found.undecided else ""
    )
    say(f"{options.out}: {len(found.rows)} rows{undecided}")


def table(found: Agreement) -> list[str]:
    """The figures in words."""
    words = {
        "ratings": "ratings that stand",
        "pairs": "pairs",
        "blind": "of them blind, with a choice",
        "left": "share of these whose left response was chosen",
        "longer": "share of pairs whose longer response was chosen",
        "self_agreement": "agreement of raters with themselves",
        "kappa": "agreement of raters beyond chance (kappa)",
    }
    width = max(map(len, words.values()))
    return [f"{words[name]:{width}}  {_number(value)}" for name, value in asdict(found).items()]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"{MODULE} inference.ratings",
        description="What people rated in the server's page, as data: docs/rating.md.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    about = {
        "export": "one row for each pair, by the majority of its raters, and for each correction",
        "merge": "several files as one, each rating once",
        "agreement": "how far raters agree, and whether place or length decides",
    }
    for name, help_text in about.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        command.add_argument("files", nargs="+", type=Path, metavar="FILE", help="ratings.jsonl")
        if name != "agreement":
            command.add_argument("--out", required=True, type=Path, metavar="FILE")
        if name == "export":
            command.add_argument(
                *("--format",),
                choices=("pairs", "hh"),
                default="pairs",
                help="pairs: prompt, chosen, rejected, margin; hh: two texts of whole dialogues",
            )
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_main(main)
