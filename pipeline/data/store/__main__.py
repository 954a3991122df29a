"""Token files: `python -m pipeline.data.store pack 'corpus/*.jsonl' --tokenizer DIR --out X`."""

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipeline.cli.options import CommandParser, print_output, run_main
from pipeline.data.store.token_file import (
    CHUNK,
    TokenFile,
    TokenWriter,
    part_path,
    read_vocabulary,
    without_suffix,
)
from pipeline.files.durable import check_writable
from pipeline.system.errors import EXIT_USER_ERROR, ConfigError, DataError, require
from pipeline.system.installation import MODULE


def main(argv: Sequence[str]) -> None:
    """Run the command named in `argv`.

    Raises:
        UserError: the files or options can't be used.
    """
    parser = CommandParser(prog=f"{MODULE} pipeline.data.store", allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(function: object, files_help: str) -> argparse.ArgumentParser:
        name, text = getattr(function, "__name__", ""), (function.__doc__ or "").strip()
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument("files", nargs="+", metavar="FILE", help=files_help)
        command.set_defaults(run=function)
        return command

    pack_command = add(pack, "paths and patterns of .jsonl, .jsonl.gz and .txt files")
    show_command, _ = add(show, "token files"), add(verify, "token files")
    merge_command = add(merge, "token files that have the same tokenizer")
    shuffle_command = add(shuffle, "one token file")
    for command in (pack_command, merge_command, shuffle_command):
        command.add_argument(
            "--out",
            type=Path,
            required=True,
            help="prefix of the files to write: OUT.bin, OUT.idx, OUT.json and OUT.sha256;"
            " they must not exist",
        )
    pack_command.add_argument("--tokenizer", required=True, help="model id or local directory")
    pack_command.add_argument("--workers", type=int, default=1, help="number of worker processes")
    pack_command.add_argument("--field", default="text", help="field that holds each row's text")
    pack_command.add_argument(
        "--on-bad-row",
        choices=("stop", "skip"),
        default="stop",
        help="stop at a row that can't be used, or log and skip it",
    )
    pack_command.add_argument(
        "--resume", action="store_true", help="continue an interrupted run; keep finished pieces"
    )
    show_command.add_argument("--document", type=int, help="zero-based index of a document to show")
    show_command.add_argument("--tokenizer", help="tokenizer for --document, by default the file's")
    shuffle_command.add_argument("--seed", type=int, default=0, help="seed of the shuffle")
    options = parser.parse_args(list(argv))
    if "out" in options:
        options.out = without_suffix(options.out)
        exists = part_path(options.out, "idx").exists()
        require(not exists, f"--out {options.out} already exists; choose another, or remove it")
        check_writable(options.out, option="--out")
    options.run(options)


def pack(options: argparse.Namespace) -> None:
    """Tokenize .jsonl, .jsonl.gz and .txt files into a token file."""
    require(options.workers >= 1, f"--workers must be at least 1, got {options.workers}")

    from pipeline.config import FrozenModelConfig
    from pipeline.data.store.pack import find_sources
    from pipeline.data.store.pack import pack as pack_files
    from pipeline.models.hf.load import load_tokenizer
    from pipeline.system.logs import configure_logging

    configure_logging(is_main=True)
    sources = find_sources(options.files)
    tokenizer = load_tokenizer(FrozenModelConfig(path=options.tokenizer))
    file = pack_files(
        sources,
        read_vocabulary(tokenizer, options.tokenizer),
        options.out,
        field=options.field,
        workers=options.workers,
        skip_bad_rows=options.on_bad_row == "skip",
        resume=options.resume,
    )
    skipped = file.origin.bad_rows if file.origin else 0
    print_output(f"{file}{f'; bad rows skipped: {skipped:,}' if skipped else ''}")


def show(options: argparse.Namespace) -> None:
    """Print the size and origin of token files, or one document with --document N."""
    for name in options.files:
        file = TokenFile(name)
        if options.document is not None:
            _show_document(file, options.document, options.tokenizer)
            continue
        print_output(f"{file} of {file.dtype.itemsize} bytes")
        if (origin := file.origin) is not None:
            print_output(
                f"  tokenizer {origin.tokenizer}, SHA-256 {origin.tokenizer_hash[:16]};"
                f" bad rows skipped: {origin.bad_rows:,}"
            )


def _show_document(file: TokenFile, document: int, name: str | None) -> None:
    last = file.num_documents - 1
    require(0 <= document <= last, f"--document must be from 0 to {last:,}, got {document}")
    name = name or (file.origin.tokenizer if file.origin else None)
    if name is None:
        raise ConfigError(f"{file.path} does not record its tokenizer; pass --tokenizer")

    from pipeline.config import FrozenModelConfig
    from pipeline.models.hf.load import load_tokenizer

    tokenizer = load_tokenizer(FrozenModelConfig(path=name))
    if file.origin and read_vocabulary(tokenizer, name).hash != file.origin.tokenizer_hash:
        raise DataError(f"{file.path} was not packed with {name}; pass the right --tokenizer")
    ids = file.tokens(document).tolist()
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    print_output(f"document {document}, {len(ids):,} tokens\n{text}\n{' '.join(map(str, ids))}")


def verify(options: argparse.Namespace) -> None:
    """Check the indices of token files, and compare the files with their checksums."""
    damaged = False
    for name in options.files:
        try:
            file = TokenFile(name)
            _verify_checksums(file)
            print_output(f"{file}; no errors found")
        except DataError as error:
            print_output(str(error))
            damaged = True
    if damaged:
        raise SystemExit(EXIT_USER_ERROR)


def _verify_checksums(file: TokenFile) -> None:
    checksums = part_path(file.path, "sha256")
    for line in checksums.read_text().splitlines() if checksums.exists() else ():
        digest, name = line.split(maxsplit=1)
        path = checksums.with_name(name)
        if not path.is_file():
            raise DataError(f"{path} is missing, but {checksums} lists it; copy both again")
        with path.open("rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != digest:
                raise DataError(f"{path} differs from its checksum; copy it again")


def merge(options: argparse.Namespace) -> None:
    """Write the documents of several token files with the same tokenizer to one file."""
    files = [TokenFile(name) for name in options.files]
    if len({file.origin and file.origin.tokenizer_hash for file in files}) > 1:
        raise DataError(f"{' '.join(options.files)} have different tokenizers; pack all with one")
    with TokenWriter(options.out, _widest_dtype(files)) as writer:
        for file in files:
            for ids, lengths in file.chunks():
                writer.append(ids, lengths)
        print_output(str(writer.finish(files[0].origin)))


def shuffle(options: argparse.Namespace) -> None:
    """Write the documents of a token file in random order."""
    if len(options.files) > 1:
        raise ConfigError(f"shuffle takes one file, got {len(options.files)}; merge them first")
    file = TokenFile(options.files[0])
    order = np.random.default_rng(options.seed).permutation(file.num_documents)
    with TokenWriter(options.out, _widest_dtype([file])) as writer:
        for first in range(0, file.num_documents, CHUNK):
            documents = [file.tokens(int(number)) for number in order[first : first + CHUNK]]
            writer.append(np.concatenate(documents), np.array([len(ids) for ids in documents]))
            file.release()
        print_output(str(writer.finish(file.origin)))


def _widest_dtype(files: Sequence[TokenFile]) -> "np.dtype[np.generic]":
    return max((file.dtype for file in files), key=lambda dtype: dtype.itemsize)


if __name__ == "__main__":
    run_main(main)
