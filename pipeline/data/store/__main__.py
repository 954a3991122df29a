"""Token files: `python -m pipeline.data.store pack 'corpus/*.jsonl' --tokenizer DIR --out X`."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pipeline.cli import run_main, say
from pipeline.command import choose_command, read_files_command
from pipeline.data.store.check import findings
from pipeline.data.store.config import (
    ChunkConfig,
    ConvertConfig,
    IndexConfig,
    MergeConfig,
    PackConfig,
    ShowConfig,
    ShuffleConfig,
    VerifyConfig,
)
from pipeline.data.store.line_index import SUFFIX, LineIndex, index_path, write_index
from pipeline.data.store.reader import TokenFile
from pipeline.data.store.show import about, show_document, show_row
from pipeline.errors import EXIT_USER_ERROR, ConfigError, DataError
from pipeline.files.lock import RunLock
from pipeline.files.output import check_output
from pipeline.help import help_entry
from pipeline.installation import MODULE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pipeline.data.chat_format import ChatFormat
    from pipeline.data.store.vocabulary import Vocabulary

PROGRAM = f"{MODULE} pipeline.data.store"
C = TypeVar("C")


def pack(words: Sequence[str]) -> None:
    """Write texts or dialogues of .jsonl files, also .gz and .zst, or .txt files as tokens."""
    names, config = _read(PackConfig, words, "pack", "FILE ... --tokenizer DIR --out X.tokens")
    check_output(config.target, option="--out")

    from pipeline.data.store.pack import pack as write
    from pipeline.data.store.sources import find_sources
    from pipeline.logs import configure_logging

    configure_logging(is_main=True)
    sources = find_sources(names, rows_alone=config.rows == "dialogues")
    if config.rows == "dialogues":
        vocabulary, chat = _chat_of(config)
    else:
        from pipeline.models.store_vocabulary import load_vocabulary_apart

        vocabulary, chat = load_vocabulary_apart(config.tokenizer), None
    with RunLock(config.target.with_name(config.target.name + ".lock")):
        packed = write(sources, vocabulary, config, chat)
    layout, bad = packed.layout, packed.bad_rows
    left_out = f", {bad:,} bad {'row' if bad == 1 else 'rows'} left out" if bad else ""
    say(
        f"{config.target} has {layout.documents:,} documents, {layout.tokens:,} tokens"
        f"{left_out}; {packed.seconds:.1f} s"
    )


def index(words: Sequence[str]) -> None:
    """Write where the rows of a file of JSON lines begin; `show` then prints any of them."""
    names, config = _read(IndexConfig, words, "index", "X.jsonl [--out X.jsonl.index]")
    source = Path(_only(names, "index"))
    out = config.out or index_path(source)
    check_output(out, option="--out")
    say(f"{out}: {write_index(source, out):,} rows of {source}")


def show(words: Sequence[str]) -> None:
    """Print what a token file or an index says of itself, or with --document N one document."""
    names, config = _read(ShowConfig, words, "show", "X.tokens [--document N]")
    for name in names:
        if name.endswith(SUFFIX):
            show_row(LineIndex(Path(name)), config.document)
            continue
        file = TokenFile(name)
        if config.document is None:
            say("\n".join(about(file)))
        else:
            home = config.tokenizer or file.origin.tokenizer
            show_document(file, config.document, partial(_tokenizer_of, file, home))


def verify(words: Sequence[str]) -> None:
    """Read every byte: CRCs, ends, ids; exit code 2 names what is damaged."""
    names, _ = _read(VerifyConfig, words, "verify", "X.tokens ...")
    damaged = False
    for name in names:
        try:
            file = TokenFile(name)
            wrong = list(findings(file))
        except DataError as error:
            wrong, summary = [str(error)], ""
        else:
            layout = file.layout
            summary = f"{layout.documents:,} documents, {layout.tokens:,} tokens, {layout.blocks}"
        damaged = damaged or bool(wrong)
        say("\n".join(wrong) if wrong else f"{name} is whole: {summary} blocks")
    if damaged:
        raise SystemExit(EXIT_USER_ERROR)


def merge(words: Sequence[str]) -> None:
    """Write the documents of several token files of one tokenizer as one."""
    names, config = _read(MergeConfig, words, "merge", "A.tokens B.tokens ... --out C.tokens")
    check_output(config.target, option="--out")
    _check_new([config.target])

    from pipeline.data.store.merge import merge as write

    files = [TokenFile(name) for name in names]
    with RunLock(config.target.with_name(config.target.name + ".lock")):
        layout = write(files, config.target)
    say(f"{config.target} has {layout.documents:,} documents, {layout.tokens:,} tokens")


def shuffle(words: Sequence[str]) -> None:
    """Write the documents of a token file in a random order, in constant memory."""
    names, config = _read(ShuffleConfig, words, "shuffle", "A.tokens [--seed N] --out B.tokens")
    check_output(config.target, option="--out")
    _check_new([config.target])

    from pipeline.data.store.shuffle import shuffle as write

    with RunLock(config.target.with_name(config.target.name + ".lock")):
        layout = write(TokenFile(_only(names, "shuffle")), config.target, seed=config.seed)
    say(f"{config.target} has {layout.documents:,} documents, {layout.tokens:,} tokens")


def chunk(words: Sequence[str]) -> None:
    """Write a token file as several: parts of one size, or shares by documents' hashes."""
    names, config = _read(ChunkConfig, words, "chunk", "A.tokens --parts N --out B.tokens")
    check_output(config.target, option="--out")

    from pipeline.data.store.chunk import chunk as write
    from pipeline.data.store.chunk import equal_parts, part_path, shared_parts

    file = TokenFile(_only(names, "chunk"))
    wanted = range(config.count) if config.part is None else [config.part]
    _check_new([part_path(config.target, part, config.count) for part in wanted])
    if config.parts is not None:
        parts = equal_parts(file, config.parts)
    else:
        parts = shared_parts(file, config.shares, seed=config.seed)
    with RunLock(config.target.with_name(config.target.name + ".lock")):
        written = write(file, config.target, parts, only=config.part)
    for path, layout in written.items():
        say(f"{path} has {layout.documents:,} documents, {layout.tokens:,} tokens")


def convert(words: Sequence[str]) -> None:
    """Write Megatron's or Modalities' file as a token file, or a token file as Megatron's."""
    takes = "FILE --to tokens|megatron --out X"
    names, config = _read(ConvertConfig, words, "convert", takes)
    source, out = Path(_only(names, "convert")), config.target
    check_output(out, option="--out")
    written = [out] if config.to == "tokens" else [Path(f"{out}.bin"), Path(f"{out}.idx")]
    _check_new(written)
    with RunLock(out.with_name(out.name + ".lock")):
        if config.to == "megatron":
            from pipeline.data.store.megatron import write_megatron

            file = TokenFile(source)
            write_megatron(file, out)
            layout = file.layout
        else:
            from pipeline.data.store.convert import to_tokens
            from pipeline.models.store_vocabulary import load_vocabulary

            layout = to_tokens(source, load_vocabulary(config.tokenizer), out)
    names_written = " and ".join(map(str, written))
    say(f"{names_written}: {layout.documents:,} documents, {layout.tokens:,} tokens")


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "index": index,
    "pack": pack,
    "show": show,
    "verify": verify,
    "merge": merge,
    "shuffle": shuffle,
    "chunk": chunk,
    "convert": convert,
}


def main(argv: Sequence[str]) -> None:
    """Do what `argv` says.

    Raises:
        UserError: it says nothing that can be done.
    """
    command, words = choose_command(COMMANDS, argv, _help)
    command(words)


def _read(
    config_class: type[C], words: Sequence[str], name: str, takes: str
) -> tuple[list[str], C]:
    """The files before the first option, and the settings."""
    about = (COMMANDS[name].__doc__ or "").strip()
    return read_files_command(config_class, words, usage=f"{PROGRAM} {name} {takes}", about=about)


def _only(names: Sequence[str], command: str) -> str:
    """The one file that a command takes."""
    if len(names) > 1:
        raise ConfigError(f"{command} takes one file, got {len(names)}; merge joins token files")
    return names[0]


def _check_new(paths: Sequence[Path]) -> None:
    """Raise where a file already exists."""
    if there := [path for path in paths if path.exists()]:
        raise ConfigError(f"{there[0]} already exists; name another file, or remove it")


def _chat_of(config: PackConfig) -> "tuple[Vocabulary, ChatFormat]":
    """The tokenizer with the chat format of dialogues, whose tokens are among its own."""
    from pipeline.config import FrozenModelConfig
    from pipeline.data.store.vocabulary import vocabulary_of
    from pipeline.models.chat import load_chat

    tokenizer, chat = load_chat(FrozenModelConfig(path=config.tokenizer), config.data)
    return vocabulary_of(tokenizer, config.tokenizer), chat


def _tokenizer_of(file: TokenFile, name: str) -> "PreTrainedTokenizerBase":
    """The one at `name`, with the tokens of the dialogues' format.

    Raises:
        DataError: it is not the one that the file was packed with.
    """
    from pipeline.config import DataConfig, FrozenModelConfig
    from pipeline.data.store.vocabulary import vocabulary_of
    from pipeline.models.load import load_tokenizer

    model, rendering = FrozenModelConfig(path=name), file.origin.rendering
    tokenizer = load_tokenizer(model)
    if rendering is not None:  # whose format may have tokens of its own
        from pipeline.models.chat import load_chat

        tokenizer, _ = load_chat(model, DataConfig(format=rendering.format))
    if vocabulary_of(tokenizer, name).hash != file.origin.tokenizer_hash:
        raise DataError(
            f"the tokenizer {name} is not the one that {file.path} was packed with; name that one"
            " with --tokenizer"
        )
    return tokenizer


def _help() -> str:
    lines = [f"usage: {PROGRAM} COMMAND ...", ""]
    for name, command in COMMANDS.items():
        lines += help_entry(name, (command.__doc__ or "").strip())
    return "\n".join([*lines, "", "COMMAND --help lists its options."])


if __name__ == "__main__":
    run_main(main)
