"""Ratings as data: `python -m inference.ratings export|merge|agreement FILE ...`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from inference.ratings.agreement import Agreement, agreement
from inference.ratings.export import Form, as_lines, export, merge
from inference.ratings.file import Rating, read_ratings, standing_ratings
from pipeline.cli import run_main, say
from pipeline.command import choose_command, read_files_command
from pipeline.errors import DataError, require
from pipeline.files.output import check_output, write_output
from pipeline.help import help_entry
from pipeline.installation import MODULE

PROGRAM = f"{MODULE} inference.ratings"
C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """Where lines go."""

    out: Path = Path()
    """The file to write; replaced where it exists."""

    def __post_init__(self) -> None:
        require(self.out != Path(), "--out is missing: give the file to write")
        check_output(self.out, option="--out")


@dataclass(frozen=True, kw_only=True)
class ExportConfig(MergeConfig):
    """Where rows go, and in which form."""

    format: Form = "pairs"
    """pairs: prompt, chosen, rejected, margin; hh: two texts of whole dialogues."""


@dataclass(frozen=True, kw_only=True)
class AgreementConfig:
    """`agreement` has no options."""


def main(argv: Sequence[str]) -> None:
    """Do what the first word says.

    Raises:
        UserError: a file can't be read or written, or holds something else than ratings.
    """
    command, words = choose_command(COMMANDS, argv, _help)
    command(words)


def export_rows(words: Sequence[str]) -> None:
    """One row for each pair, by the majority of its raters, and for each correction."""
    files, config = _read(ExportConfig, words, "export", "FILE ... --out FILE")
    found = export(standing_ratings(merge(files.values())), config.format)
    if not found.rows:
        raise DataError(f"no rating prefers a response: {', '.join(files)}")
    write_output({config.out: as_lines(found.rows)}, option="--out")
    undecided = (
        f"; {found.undecided} pairs without a preference left out" if found.undecided else ""
    )
    say(f"{config.out}: {len(found.rows)} rows{undecided}")


def merge_files(words: Sequence[str]) -> None:
    """Several files as one, each rating once."""
    files, config = _read(MergeConfig, words, "merge", "FILE ... --out FILE")
    ratings = merge(files.values())
    write_output({config.out: as_lines(ratings)}, option="--out")
    say(f"{config.out}: {len(ratings)} lines")


def show_agreement(words: Sequence[str]) -> None:
    """How far raters agree, and whether place or length decides."""
    files, _ = _read(AgreementConfig, words, "agreement", "FILE ...")
    say("\n".join(table(agreement(standing_ratings(merge(files.values()))))))


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


COMMANDS = {"export": export_rows, "merge": merge_files, "agreement": show_agreement}


def _read(
    config_class: type[C], words: Sequence[str], name: str, takes: str
) -> tuple[dict[str, list[Rating]], C]:
    """The ratings of each file before the first option, and the settings."""
    about = (COMMANDS[name].__doc__ or "").strip()
    files, config = read_files_command(
        config_class, words, usage=f"{PROGRAM} {name} {takes}", about=about
    )
    return {file: read_ratings(Path(file)) for file in files}, config


def _help() -> str:
    lines = [f"usage: {PROGRAM} COMMAND FILE ...", ""]
    for name, command in COMMANDS.items():
        lines += help_entry(name, (command.__doc__ or "").strip())
    return "\n".join([*lines, "", "COMMAND --help lists its options."])


if __name__ == "__main__":
    run_main(main)
