"""What `show` prints: of a token file or an index, of one document or row."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from pipeline.cli import say
from pipeline.data.store.line_index import LineIndex
from pipeline.data.store.reader import TokenFile
from pipeline.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def about(file: TokenFile) -> list[str]:
    """What the header says, line by line."""
    origin, layout = file.origin, file.layout
    more = origin.files - len(origin.names)
    names = ", ".join([*origin.names, *([f"{more:,} more"] if more > 0 else [])])
    rendering = origin.rendering
    if rendering is None:
        field, left_out = f", field {origin.field}", ""
    else:
        field, left_out = "", f", {rendering.left_out:,} rows with nothing to learn from"
    lines = [
        f"{file.path}: {layout.documents:,} documents, {layout.tokens:,} tokens of"
        f" {layout.width} bytes, {layout.size:,} bytes in {layout.blocks:,} blocks",
        f"  tokenizer   {origin.tokenizer}, SHA-256 {origin.tokenizer_hash[:16]},"
        f" vocabulary {origin.vocabulary:,}, eos {origin.eos}",
        f"  sources     {names}: {origin.bytes:,} bytes{field}",
        f"  left out    {origin.bad_rows:,} bad rows{left_out}",
    ]
    return lines if rendering is None else [*lines, f"  dialogues   {rendering.described}"]


def show_row(index: LineIndex, number: int | None) -> None:
    """Print a row of an indexed file; without a number, how many there are.

    Raises:
        DataError, ConfigError: the index is damaged, or has no such row.
    """
    if not index.is_intact():
        raise DataError(f"{index.path} is damaged; index {index.source} again")
    if number is None:
        say(f"{index.path}: {index.rows:,} rows of {index.source}")
        return
    if not 0 <= number < index.rows:
        last = index.rows - 1
        raise ConfigError(f"--document {number} is not there: {index.path} has rows 0 to {last:,}")
    say(index.row(number).decode("utf-8", "replace"))


def show_document(
    file: TokenFile, number: int, tokenizer_of: "Callable[[], PreTrainedTokenizerBase]"
) -> None:
    """Print the text and the ids of a document, of a dialogue what is learned between [[ and ]].

    Raises:
        ConfigError: there is no such document.
    """
    if not 0 <= number < file.documents:
        raise ConfigError(
            f"--document {number} is not there: {file.path} has the documents 0 to"
            f" {file.documents - 1:,}"
        )
    begin, end = file.span(number)
    ids = file.slice(begin, end).tolist()
    tokenizer = tokenizer_of()

    def text(part: Sequence[int]) -> str:
        return str(tokenizer.decode(list(part), clean_up_tokenization_spaces=False))

    say(f"document {number}, {len(ids):,} tokens")
    if file.has_marks:
        pairs = zip(file.trained(begin, end).tolist(), ids, strict=True)
        parts = [
            (learned, text([each for _, each in group]))
            for learned, group in groupby(pairs, key=lambda pair: pair[0])
        ]
        say("".join(f"[[{part}]]" if learned else part for learned, part in parts))
    else:
        say(text(ids[:-1]))
    say(" ".join(map(str, ids)))
