"""A piece of the corpus as tokens: what a worker does, alone."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.store.pieces import BOM, Piece, lines_of, text_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BATCH_BYTES = 256 * 2**10
"""Text handed to the tokenizer at a time: what it returns takes 300 bytes a token."""


@dataclass(frozen=True)
class Rows:
    """How rows are read."""

    field: str
    max_row: int
    eos: int
    width: int


@dataclass(frozen=True)
class Encoded:
    """The documents of a piece."""

    ids: NDArray[Any]
    """Tokens of all, each document ended by eos: [tokens]."""

    lengths: NDArray[np.uint32]
    """[documents]"""

    lines: int
    bad: tuple[tuple[int, str], ...]
    """(line of the piece, counted from 0; what is wrong with it)."""


def make_encoder(definition: str) -> "Tokenizer":
    """A tokenizer of its JSON definition, for which special tokens in a text are text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode_piece(tokenizer: "Tokenizer", piece: Piece, rows: Rows) -> Encoded:
    """The documents of a piece.

    Raises:
        DataError: its file can't be read.
    """
    ids: list[NDArray[Any]] = []
    lengths: list[int] = []
    bad: list[tuple[int, str]] = []
    texts: list[str] = []
    waiting = number = 0

    def encode() -> None:
        for each in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            document = np.array([*each.ids, rows.eos], dtype=f"<u{rows.width}")
            ids.append(document)
            lengths.append(len(document))
        texts.clear()

    for number, (size, text) in enumerate(_texts(piece, rows), 1):
        if isinstance(text, str):
            texts.append(text)
            waiting += size
        elif text is not None:
            bad.append((number - 1, text.reason))
        if waiting >= BATCH_BYTES:
            encode()
            waiting = 0
    encode()
    joined = np.concatenate(ids) if ids else np.zeros(0, f"<u{rows.width}")
    return Encoded(joined, np.array(lengths, np.uint32), number, tuple(bad))


@dataclass(frozen=True)
class BadRow:
    """A row that can't be used."""

    reason: str


def _texts(piece: Piece, rows: Rows) -> Iterator[tuple[int, str | BadRow | None]]:
    """Bytes and text of each row; of a file that is one text, of that."""
    if piece.is_text:
        content = text_of(piece, rows.max_row)
        yield len(content), whole_text(content, rows)
        return
    for number, line in enumerate(lines_of(piece, rows.max_row), 1):
        first = piece.begin == 0 and number == 1
        yield len(line), read_text(line.removeprefix(BOM) if first else line, rows)


def whole_text(content: bytes, rows: Rows) -> str | BadRow | None:
    """The text of a file that is one; None of an empty one."""
    if len(content) > rows.max_row:
        return BadRow(f"it is longer than --max-row, {rows.max_row:,} bytes")
    try:
        return content.removeprefix(BOM).decode("utf-8") or None
    except UnicodeDecodeError as error:
        return BadRow(f"it is no UTF-8 at byte {error.start}")


def read_text(line: bytes, rows: Rows) -> str | BadRow | None:
    """The text of a row; None of an empty line."""
    if len(line) > rows.max_row and len(line.rstrip(b"\r\n")) > rows.max_row:
        return BadRow(f"it is longer than --max-row, {rows.max_row:,} bytes")
    if not line.strip():
        return None
    try:
        text = _text_of(json.loads(line.rstrip().decode("utf-8")), rows.field)
    except UnicodeDecodeError as error:
        return BadRow(f"it is no UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        return BadRow(f"it is no JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError):
        return BadRow("it is no JSON that can be read: nested too deep, or a number too long")
    return text


def _text_of(row: object, field: str) -> str | BadRow:
    if not isinstance(row, dict):
        return BadRow(f"it is no object, but {_kind(row)}")
    if field not in row:
        return BadRow(f"it has no field {field!r}")
    text = row[field]
    if not isinstance(text, str):
        return BadRow(f"its field {field!r} is no text, but {_kind(text)}")
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
