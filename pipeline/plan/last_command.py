"""The command of a run, kept in its output directory, so that `--resume` alone repeats its options.

`OUT/command.txt` has it as a shell reads it. Paths are as they were typed: the command is for the
directory in which it was given.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from pipeline.cli import split_options
from pipeline.files.durable import replace_durably
from pipeline.installation import TRAIN
from pipeline.plan.output import COMMAND
from pipeline.plan.request import Request

NOT_OF_THE_RUN = ("output_dir", "resume", "overwrite", "dry_run")
"""Options about how a command treats a run: not part of the run, and never kept."""


def record_command(out: Path, argv: Sequence[str]) -> None:
    """Keep the options of the command that runs in the output directory `out`."""
    text = " ".join([TRAIN, shlex.join(_words_of_the_run(argv))]).rstrip() + "\n"
    path = out / COMMAND
    replace_durably(path, text.encode(), temporary=path.with_name(f"{COMMAND}.partial"))


def with_last_options(argv: Sequence[str]) -> list[str]:
    """The command line; where it asks to resume and says nothing else, with the run's options.

    Nothing else is an output directory, and `--dry-run`. A directory without a recorded command
    adds nothing.
    """
    given = dict(split_options(argv))
    if given.get("resume") not in ([], ["true"]) or given.keys() - set(NOT_OF_THE_RUN):
        return list(argv)
    out = Path(" ".join(given.get("output_dir", [])) or Request.output_dir)
    try:
        words = shlex.split((out / COMMAND).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return list(argv)
    options = next((words[i:] for i, word in enumerate(words) if word.startswith("--")), [])
    return [*options, *argv]


def _words_of_the_run(argv: Sequence[str]) -> list[str]:
    """The words of a command line, without those of `NOT_OF_THE_RUN`."""
    words: list[str] = []
    kept = True
    for word in argv:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            kept = name not in NOT_OF_THE_RUN
        if kept:
            words.append(word)
    return words
