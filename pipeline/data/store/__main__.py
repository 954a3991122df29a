"""Token files: `python -m pipeline.data.store pack 'corpus/*.jsonl' --tokenizer DIR --out X`."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from pipeline.cli.help import help_entry
from pipeline.cli.options import choose_command, read_files_command, run_main, say
from pipeline.data.store.token_file import (
    CHUNK,
    TokenFile,
    TokenWriter,
    checksum_path,
    index_path,
    without_suffix,
)
from pipeline.files.output import check_output
from pipeline.system.errors import EXIT_USER_ERROR, ConfigError, DataError, require
from pipeline.system.installation import MODULE

PROGRAM = f"{MODULE} pipeline.data.store"
C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Options of commands that write a token file."""

    out: Path | None = None
    """The file to write: OUT.bin, OUT.idx, OUT.json and OUT.sha256; it must not exist."""

    def __post_init__(self) -> None:
        require(self.out is not None, "out is missing; give the file to write")
        require(
            not index_path(self.target).exists(),
            f"out {self.target} already exists; name another file, or remove it",
        )
        check_output(self.target, option="--out")

    @property
    def target(self) -> Path:
        """Prefix of the files to write."""
        assert self.out is not None
        return without_suffix(self.out)


@dataclass(frozen=True, kw_only=True)
class PackConfig(OutputConfig):
    """Options of `pack`."""

    tokenizer: str = ""
    """Model id or local directory of the tokenizer."""

    workers: int = 1
    """Processes that tokenize; the result is the same for any number of them."""

    field: str = "text"
    """The field of each row that holds its text."""

    on_bad_row: Literal["stop", "skip"] = "stop"
    """Stop at a row that can't be used, or log and skip it."""

    resume: bool = False
    """Continue an interrupted pack; finished pieces are kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.tokenizer), "tokenizer is missing; give its directory or model id")
        require(self.workers >= 1, f"workers must be at least 1, got {self.workers}")


@dataclass(frozen=True, kw_only=True)
class ShowConfig:
    """Options of `show`."""

    document: int | None = None
    """Print the text and the ids of this document, counted from 0."""

    tokenizer: str | None = None
    """The tokenizer to decode with; default is the one that the file names."""


@dataclass(frozen=True, kw_only=True)
class ShuffleConfig(OutputConfig):
    """Options of `shuffle`."""

    seed: int = 0
    """Seed of the order."""


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """`verify` has no options."""


def pack(words: Sequence[str]) -> None:
    """Tokenize .jsonl (also .gz) and .txt files into a token file."""
    names, config = _read(PackConfig, words, "pack", "FILE ... --tokenizer DIR --out X")

    from pipeline.config import FrozenModelConfig
    from pipeline.data.store.pack import find_sources
    from pipeline.data.store.pack import pack as write
    from pipeline.data.store.vocabulary import vocabulary_of
    from pipeline.models.load import load_tokenizer
    from pipeline.system.logs import configure_logging

    configure_logging(is_main=True)
    sources = find_sources(names)
    tokenizer = load_tokenizer(FrozenModelConfig(path=config.tokenizer))
    packed = write(
        sources,
        vocabulary_of(tokenizer, config.tokenizer),
        config.target,
        field=config.field,
        workers=config.workers,
        skip_bad_rows=config.on_bad_row == "skip",
        resume=config.resume,
    )
    skipped = f", {packed.bad_rows:,} bad rows skipped" if packed.bad_rows else ""
    say(f"{_summary(packed.file)}{skipped}; {packed.seconds:.1f} s")


def show(words: Sequence[str]) -> None:
    """Print the size and origin of a token file, or with --document N one document."""
    names, config = _read(ShowConfig, words, "show", "X [--document N]")
    for name in names:
        file = TokenFile(name)
        if config.document is not None:
            _show_document(file, config.document, config.tokenizer)
            continue
        say(f"{_summary(file)} of {file.dtype.itemsize} bytes")
        if (origin := file.origin) is not None:
            say(
                f"  tokenizer {origin.tokenizer}, SHA-256 {origin.tokenizer_hash[:16]}, vocabulary"
                f" {origin.vocabulary:,}, eos {origin.eos}\n"
                f"  {origin.sources:,} source files, {origin.bad_rows:,} bad rows skipped"
            )


def _show_document(file: TokenFile, number: int, name: str | None) -> None:
    if not 0 <= number < file.documents:
        raise ConfigError(f"--document must be 0 to {file.documents - 1:,}, got {number}")
    name = name or (file.origin.tokenizer if file.origin else None)
    if name is None:
        raise ConfigError(f"{file.path} does not name its tokenizer; give it with --tokenizer")

    from pipeline.config import FrozenModelConfig
    from pipeline.data.store.vocabulary import vocabulary_of
    from pipeline.models.load import load_tokenizer

    tokenizer = load_tokenizer(FrozenModelConfig(path=name))
    if file.origin and vocabulary_of(tokenizer, name).hash != file.origin.tokenizer_hash:
        raise DataError(f"{file.path} was packed with another tokenizer than {name}; name that one")
    ids = file.tokens(number).tolist()
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    say(f"document {number}, {len(ids):,} tokens\n{text}\n{' '.join(map(str, ids))}")


def verify(words: Sequence[str]) -> None:
    """Compare token files with their checksums, and check every document and id."""
    names, _ = _read(VerifyConfig, words, "verify", "X ...")
    damaged = False
    for name in names:
        try:
            file = TokenFile(name)
            wrong = [*_wrong_checksums(file), *_wrong_documents(file)]
        except DataError as error:
            wrong = [str(error)]
        else:
            if not wrong:
                say(f"{_summary(file)}; no errors found")
        damaged = damaged or bool(wrong)
        for sentence in wrong:
            say(sentence)
    if damaged:
        raise SystemExit(EXIT_USER_ERROR)


def _wrong_checksums(file: TokenFile) -> Iterator[str]:
    path = checksum_path(file.path)
    for line in path.read_text().splitlines() if path.exists() else ():
        digest, name = line.split(maxsplit=1)
        with path.with_name(name).open("rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != digest:
                yield f"{path.with_name(name)} differs from its checksum; copy it again"


def _wrong_documents(file: TokenFile) -> Iterator[str]:
    """Errors of the index and the ids, for files that came without checksums."""
    size = file.dtype.itemsize
    position = 0
    for first in range(0, len(file.offsets), CHUNK):
        lengths = file.lengths[first : first + CHUNK].astype(np.int64)
        ends = position + np.cumsum(lengths)
        if (lengths < 0).any() or ((ends - lengths) * size != file.offsets[first:][:CHUNK]).any():
            yield f"{file.path} has an index whose documents are not consecutive; copy it again"
            return
        position = int(ends[-1])
    for ids, lengths in file.chunks() if file.origin else ():
        assert file.origin is not None
        if len(ids) and not 0 <= ids.min() <= ids.max() < file.origin.vocabulary:
            yield f"{file.path} has ids outside its vocabulary; pack it again"
            return
        if (ids[np.cumsum(lengths) - 1] != file.origin.eos).any():
            yield f"{file.path} has a document without eos at its end; pack it again"
            return


def merge(words: Sequence[str]) -> None:
    """Write the documents of several token files of one tokenizer as one file."""
    names, config = _read(OutputConfig, words, "merge", "A B ... --out C")
    files = [TokenFile(name) for name in names]
    first = files[0].origin
    for file in files:
        if (file.origin and file.origin.tokenizer_hash) != (first and first.tokenizer_hash):
            raise DataError(
                f"{file.path} and {files[0].path} have different tokenizers; pack them with one"
            )
    dtype = max((file.dtype for file in files), key=lambda each: each.itemsize)
    with TokenWriter(config.target, _megatron_type(dtype)) as writer:
        for file in files:
            for ids, lengths in file.chunks():
                writer.append(ids, lengths)
        say(_summary(writer.finish(first)))


def shuffle(words: Sequence[str]) -> None:
    """Write the documents of a token file in random order."""
    names, config = _read(ShuffleConfig, words, "shuffle", "A [--seed N] --out B")
    if len(names) > 1:
        raise ConfigError(f"shuffle takes one file, got {len(names)}; merge them first")
    file = TokenFile(names[0])
    order = np.random.default_rng(config.seed).permutation(file.documents)
    with TokenWriter(config.target, _megatron_type(file.dtype)) as writer:
        for first in range(0, file.documents, CHUNK):
            documents = [file.tokens(int(number)) for number in order[first : first + CHUNK]]
            writer.append(np.concatenate(documents), np.array([len(ids) for ids in documents]))
            file.release()
        say(_summary(writer.finish(file.origin)))


def _megatron_type(dtype: "np.dtype[np.generic]") -> "np.dtype[np.generic]":
    """The type itself, or i32 for Modalities' u32, which Megatron does not have."""
    return np.dtype("<i4") if dtype == np.dtype("<u4") else dtype


def _summary(file: TokenFile) -> str:
    return f"{file.path}: {file.documents:,} documents, {len(file.ids):,} tokens"


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "pack": pack,
    "show": show,
    "verify": verify,
    "merge": merge,
    "shuffle": shuffle,
}


def main(argv: Sequence[str]) -> None:
    """Run the command that `argv` names.

    Raises:
        UserError: wrong files or options.
    """
    command, words = choose_command(COMMANDS, argv, _help)
    command(words)


def _read(
    config_class: type[C], words: Sequence[str], name: str, takes: str
) -> tuple[list[str], C]:
    """The files before the first option, and the settings."""
    about = (COMMANDS[name].__doc__ or "").strip()
    return read_files_command(config_class, words, usage=f"{PROGRAM} {name} {takes}", about=about)


def _help() -> str:
    lines = [f"usage: {PROGRAM} COMMAND ...", ""]
    for name, command in COMMANDS.items():
        lines += help_entry(name, (command.__doc__ or "").strip())
    return "\n".join([*lines, "", "COMMAND --help lists its options."])


if __name__ == "__main__":
    run_main(main)
