"""A piece of the corpus as tokens: what a worker does, alone."""

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.data.store.documents import Documents
from pipeline.data.store.pieces import BOM, Piece, lines_of, text_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BATCH_BYTES = 256 * 2**10
"""Text handed to the tokenizer at a time: what it returns takes 300 bytes a token, 20 MB in all,
and smaller batches take up to a tenth more time."""


@dataclass(frozen=True)
class Limits:
    """What all rows are read and written by."""

    max_row: int
    """Bytes of the longest."""

    eos: int
    width: int
    """Bytes of a token."""


@dataclass(frozen=True)
class Encoded:
    """The documents of a piece."""

    documents: Documents
    lines: int

    bad: tuple[tuple[int, str], ...]
    """(line of the piece, counted from 0; what is wrong with it)."""

    left_out: Counter[str] = field(default_factory=Counter[str])
    """Rows with nothing to learn from, by the reason."""


Encoder = Callable[[Piece], Encoded]


class Recipe(Protocol):
    """How pieces become tokens; it goes to the worker processes."""

    def make(self) -> Encoder:
        """What does it, in the process that calls this."""
        ...


@dataclass(frozen=True)
class TextRecipe:
    """The texts in a field of the rows."""

    definition: str
    """Of the tokenizer, in JSON."""

    field: str
    limits: Limits

    def make(self) -> Encoder:
        """What turns pieces into tokens, in the process that calls this."""
        tokenizer = make_encoder(self.definition)
        return lambda piece: encode_texts(tokenizer, piece, self)


def make_encoder(definition: str) -> "Tokenizer":
    """A tokenizer of its JSON definition, for which special tokens in a text are text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode_texts(tokenizer: "Tokenizer", piece: Piece, recipe: TextRecipe) -> Encoded:
    """The documents of a piece, each ended by eos.

    Raises:
        DataError: its file can't be read.
    """
    limits = recipe.limits
    ids: list[NDArray[Any]] = []
    lengths: list[int] = []
    bad: list[tuple[int, str]] = []
    texts: list[str] = []
    waiting = number = 0

    def encode() -> None:
        batch = array("I")
        for each in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            before = len(batch)
            batch.fromlist(each.ids)
            batch.append(limits.eos)
            lengths.append(len(batch) - before)
        ids.append(np.frombuffer(batch, np.uint32).astype(f"<u{limits.width}"))
        texts.clear()

    for number, (size, text) in enumerate(_texts(piece, recipe), 1):
        if isinstance(text, str):
            texts.append(text)
            waiting += size
        elif text is not None:
            bad.append((number - 1, text.reason))
        if waiting >= BATCH_BYTES:
            encode()
            waiting = 0
    encode()
    return Encoded(Documents(np.concatenate(ids), np.array(lengths, np.int64)), number, tuple(bad))


@dataclass(frozen=True)
class BadRow:
    """A row that can't be used."""

    reason: str


def _texts(piece: Piece, recipe: TextRecipe) -> Iterator[tuple[int, str | BadRow | None]]:
    """Bytes and text of each row; of a file that is one text, of that."""
    if piece.is_text:
        content = text_of(piece, recipe.limits.max_row)
        yield len(content), whole_text(content, recipe.limits)
        return
    for size, row in rows_of(piece, recipe.limits):
        yield size, _text_of(row, recipe.field) if isinstance(row, dict) else row


def rows_of(piece: Piece, limits: Limits) -> Iterator[tuple[int, dict[str, Any] | BadRow | None]]:
    """Bytes and columns of each row; None of an empty line."""
    for number, line in enumerate(lines_of(piece, limits.max_row), 1):
        first = piece.begin == 0 and number == 1
        yield len(line), read_row(line.removeprefix(BOM) if first else line, limits)


def whole_text(content: bytes, limits: Limits) -> str | BadRow | None:
    """The text of a file that is one; None of an empty one."""
    if len(content) > limits.max_row:
        return BadRow(f"it is longer than --max-row, {limits.max_row:,} bytes")
    try:
        return content.removeprefix(BOM).decode("utf-8") or None
    except UnicodeDecodeError as error:
        return BadRow(f"it is not UTF-8 at byte {error.start}")


def read_row(line: bytes, limits: Limits) -> dict[str, Any] | BadRow | None:
    """The columns of a row; None of an empty line."""
    if len(line) > limits.max_row and len(line.rstrip(b"\r\n")) > limits.max_row:
        return BadRow(f"it is longer than --max-row, {limits.max_row:,} bytes")
    if not line.strip():
        return None
    try:
        row = json.loads(line.rstrip().decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(f"it is not UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        return BadRow(f"it is not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError):
        return BadRow("it is not JSON that can be read: nested too deep, or a number too long")
    return row if isinstance(row, dict) else BadRow(f"it is not an object, but {_kind(row)}")


def _text_of(row: dict[str, Any], field: str) -> str | BadRow:
    if field not in row:
        return BadRow(f"it has no field {field!r}")
    text = row[field]
    if not isinstance(text, str):
        return BadRow(f"its field {field!r} is not text, but {_kind(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return BadRow(f"its text has half a surrogate pair at character {error.start}")
    return text


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "true or false"
    names = {int: "a number", float: "a number", list: "a list", dict: "an object", str: "a text"}
    return names.get(type(value), "null")
