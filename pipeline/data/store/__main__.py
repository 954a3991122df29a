"""Token files: `python -m pipeline.data.store pack 'corpus/*.jsonl' --tokenizer DIR --out X`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pipeline.cli.options import run_main, say
from pipeline.data.store.token_file import TokenFile, part_path, read_vocabulary, without_suffix
from pipeline.files.durable import check_output
from pipeline.system.errors import ConfigError, DataError, require
from pipeline.system.installation import MODULE


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self.prog} --help lists the options")


def main(argv: Sequence[str]) -> None:
    """Run the command named in `argv`.

    Raises:
        UserError: wrong files or options.
    """
    parser = _Parser(prog=f"{MODULE} pipeline.data.store", allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(function: object, files: str) -> argparse.ArgumentParser:
        name, about = getattr(function, "__name__", ""), (function.__doc__ or "").strip()
        command = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        command.add_argument("files", nargs="+", metavar="FILE", help=files)
        command.set_defaults(run=function)
        return command

    packs = add(pack, "paths and patterns of .jsonl, .jsonl.gz and .txt files")
    shows = add(show, "token files")
    packs.add_argument(
        "--out",
        type=Path,
        required=True,
        help="file to write: OUT.bin, OUT.idx, OUT.json and OUT.sha256; it must not exist",
    )
    packs.add_argument("--tokenizer", required=True, help="model id or local directory")
    packs.add_argument("--workers", type=int, default=1, help="processes that tokenize")
    packs.add_argument("--field", default="text", help="field of each row with its text")
    packs.add_argument(
        "--on-bad-row",
        choices=("stop", "skip"),
        default="stop",
        help="stop at a row that can't be used, or log and skip it",
    )
    packs.add_argument(
        "--resume", action="store_true", help="continue an interrupted pack; keep finished pieces"
    )
    shows.add_argument("--document", type=int, help="print this document, counted from 0")
    shows.add_argument("--tokenizer", help="decodes the document; default: the file's")
    options = parser.parse_args(list(argv))
    if "out" in options:
        options.out = without_suffix(options.out)
        exists = part_path(options.out, "idx").exists()
        require(not exists, f"--out {options.out} already exists; choose another, or remove it")
        check_output(options.out, option="--out")
    options.run(options)


def pack(options: argparse.Namespace) -> None:
    """Tokenize .jsonl (also .gz) and .txt files into a token file."""
    require(options.workers >= 1, f"--workers must be at least 1, got {options.workers}")

    from pipeline.config import FrozenModelConfig
    from pipeline.data.store.pack import find_sources
    from pipeline.data.store.pack import pack as write
    from pipeline.models.hf.load import load_tokenizer
    from pipeline.system.logs import configure_logging

    configure_logging(is_main=True)
    sources = find_sources(options.files)
    tokenizer = load_tokenizer(FrozenModelConfig(path=options.tokenizer))
    file = write(
        sources,
        read_vocabulary(tokenizer, options.tokenizer),
        options.out,
        field=options.field,
        workers=options.workers,
        skip_bad_rows=options.on_bad_row == "skip",
        resume=options.resume,
    )
    skipped = file.origin.bad_rows if file.origin else 0
    say(f"{file}{f', {skipped:,} bad rows skipped' if skipped else ''}")


def show(options: argparse.Namespace) -> None:
    """Print the size and origin of token files, or with --document N one document."""
    for name in options.files:
        file = TokenFile(name)
        if options.document is not None:
            _show_document(file, options.document, options.tokenizer)
            continue
        say(f"{file} of {file.dtype.itemsize} bytes")
        if (origin := file.origin) is not None:
            say(
                f"  tokenizer {origin.tokenizer}, SHA-256 {origin.tokenizer_hash[:16]},"
                f" {origin.bad_rows:,} bad rows skipped"
            )


def _show_document(file: TokenFile, number: int, name: str | None) -> None:
    if not 0 <= number < file.documents:
        raise ConfigError(f"--document must be 0 to {file.documents - 1:,}, got {number}")
    name = name or (file.origin.tokenizer if file.origin else None)
    if name is None:
        raise ConfigError(f"{file.path} does not record its tokenizer; pass --tokenizer")

    from pipeline.config import FrozenModelConfig
    from pipeline.models.hf.load import load_tokenizer

    tokenizer = load_tokenizer(FrozenModelConfig(path=name))
    if file.origin and read_vocabulary(tokenizer, name).hash != file.origin.tokenizer_hash:
        raise DataError(f"{file.path} was not packed with the tokenizer {name}; pass the right one")
    ids = file.tokens(number).tolist()
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    say(f"document {number}, {len(ids):,} tokens\n{text}\n{' '.join(map(str, ids))}")


if __name__ == "__main__":
    run_main(main)
