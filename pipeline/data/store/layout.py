"""The bytes of a token file.

All numbers are little-endian. `align` is up to the next multiple of 64.

    0           header, 4,096 bytes
                  magic "RLTOKENS" | version u32 | token width u8 (2 or 4) | flags u8 | u16 (0)
                  | tokens u64 | documents u64 | length of the JSON u32 | CRC-32 of the header u32
                  | JSON in UTF-8 | zeros
    4,096       tokens, unsigned
    align       ends of the documents, u64 each: document i is tokens[ends[i - 1] : ends[i]]
    next        of dialogues (version 2, flags 1; texts have version 1, flags 0) a record of each
                document, 24 bytes:
                  hash of its prompt u64 | hash of its texts u64
                  | uses u64 (bit 0 demonstration, 1 pair, 2 prompt)
    next        of dialogues a bit for each token, the lowest of a byte first: whether it is learned
    next        CRC-32 of each 16 MiB of all from 4,096 to here, u32 each
    next        footer, 40 bytes
                  begin of the ends u64 | begin of the CRCs u64 | number of CRCs u64
                  | CRC-32 of the CRCs u32 | CRC-32 of the footer so far u32 | magic "RLTOKEND"

The CRC-32 is zlib's; that of the header is taken with its own field zero.
"""

import json
import struct
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.store.marks import RECORD
from pipeline.errors import DataError

MAGIC, END_MAGIC = b"RLTOKENS", b"RLTOKEND"
VERSION = 1
MARKED_VERSION = 2
"""Of files of dialogues, which earlier programs must not take for texts."""

MARKED = 1
"""The flag of files of dialogues."""

HEADER_BYTES = 4096
BLOCK_BYTES = 16 * 2**20
ALIGNMENT = 64
END_BYTES, CRC_BYTES = 8, 4
RECORD_BYTES = RECORD.itemsize

_FIXED = struct.Struct("<8sIBBHQQI")
_CRC = struct.Struct("<I")
_FOOTER = struct.Struct("<QQQI")
FOOTER_BYTES = _FOOTER.size + _CRC.size + len(END_MAGIC)
_JSON_BEGIN = _FIXED.size + _CRC.size
_JSON_ROOM = HEADER_BYTES - _JSON_BEGIN
_NAMED_FILES = 16
_LONGEST_NAME = 100


def token_width(vocabulary: int) -> int:
    """Bytes of a token whose id is below `vocabulary`."""
    return 2 if vocabulary <= 2**16 else 4


@dataclass(frozen=True)
class Rendering:
    """How dialogues became tokens: a step that reads them must be set alike."""

    format: str
    """Name of the chat format."""

    template: str
    """SHA-256 of its text, hexadecimal."""

    train_on: str
    history: str

    left_out: int = 0
    """Rows with nothing to learn from, which are no documents."""

    @property
    def settings(self) -> tuple[str, str, str]:
        """What decides the tokens and which of them are learned."""
        return self.template, self.train_on, self.history

    @property
    def described(self) -> str:
        """The rendering in words, for messages."""
        return (
            f"format {self.format} {self.template[:8]}, train_on {self.train_on}, history"
            f" {self.history}"
        )


@dataclass(frozen=True)
class Origin:
    """What the tokens were made of and with: the JSON of the header."""

    tokenizer: str
    """The name or directory of the tokenizer."""

    tokenizer_hash: str
    """SHA-256 of the tokenizer's definition, hexadecimal."""

    vocabulary: int
    """Every id is below this."""

    eos: int
    """The id that ends every document."""

    field: str
    """The column of the rows that was read."""

    files: int
    """Number of source files."""

    bytes: int
    """Their size, compressed if they are."""

    sources: str
    """SHA-256 of their names and sizes, hexadecimal."""

    names: tuple[str, ...]
    """Names of the first of them, without directories."""

    bad_rows: int = 0
    """Rows that were skipped."""

    rendering: Rendering | None = None
    """Of dialogues; None of texts."""

    @property
    def width(self) -> int:
        """Bytes of a token."""
        return token_width(self.vocabulary)

    def shortened(self) -> "Origin":
        """With as many names as the header has room for."""
        names = tuple(name[:_LONGEST_NAME] for name in self.names[:_NAMED_FILES])
        return replace(self, tokenizer=self.tokenizer[-500:], names=names)


@dataclass(frozen=True)
class Layout:
    """Where the parts of a token file lie, in bytes from its beginning."""

    width: int
    tokens: int
    documents: int

    has_marks: bool = False
    """Of dialogues."""

    @property
    def tokens_end(self) -> int:
        """After the last token."""
        return HEADER_BYTES + self.width * self.tokens

    @property
    def ends_begin(self) -> int:
        """Where the documents' ends begin."""
        return -(-self.tokens_end // ALIGNMENT) * ALIGNMENT

    @property
    def records_begin(self) -> int:
        """Where the records of dialogues begin, which is the end of the ends."""
        return self.ends_begin + END_BYTES * self.documents

    @property
    def bits_begin(self) -> int:
        """Where the bits begin that say which tokens are learned."""
        return self.records_begin + self.has_marks * RECORD_BYTES * self.documents

    @property
    def crcs_begin(self) -> int:
        """Where the CRCs of the blocks begin, which is the end of the blocks."""
        return self.bits_begin + self.has_marks * -(-self.tokens // 8)

    @property
    def blocks(self) -> int:
        """Number of blocks with a CRC."""
        return -(-(self.crcs_begin - HEADER_BYTES) // BLOCK_BYTES)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.crcs_begin + CRC_BYTES * self.blocks + FOOTER_BYTES

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the tokens."""
        return np.dtype(f"<u{self.width}")


def encode_header(layout: Layout, origin: Origin) -> bytes:
    """The first 4,096 bytes."""
    text = _encode_origin(origin.shortened())
    while len(text) > _JSON_ROOM:  # names in scripts that JSON escapes take six bytes a letter
        origin = Origin(**{**asdict(origin.shortened()), "names": origin.names[:-1]})
        text = _encode_origin(origin)
    version = MARKED_VERSION if layout.has_marks else VERSION
    flags = MARKED * layout.has_marks
    numbers = (layout.width, flags, 0, layout.tokens, layout.documents, len(text))
    fixed = _FIXED.pack(MAGIC, version, *numbers)
    rest = text.ljust(_JSON_ROOM, b"\0")
    return fixed + _CRC.pack(zlib.crc32(fixed + bytes(4) + rest)) + rest


def decode_header(path: Path, head: bytes) -> tuple[Layout, Origin]:
    """What the first bytes of the file at `path` say.

    Raises:
        DataError: they are not those of a token file that this version reads.
    """
    if head[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path} is not a token file; `pipeline.data.store pack` writes them")
    if len(head) < HEADER_BYTES:
        raise DataError(f"{path} ends within its header: it was not copied whole; copy it again")
    _, version, width, flags, _, tokens, documents, length = _FIXED.unpack_from(head)
    if (version, flags) not in ((VERSION, 0), (MARKED_VERSION, MARKED)):
        raise DataError(
            f"{path} is a token file of version {version} (flags {flags}), and this program reads"
            f" versions {VERSION} and {MARKED_VERSION}; pack it again"
        )
    zeroed = head[: _FIXED.size] + bytes(4) + head[_JSON_BEGIN:]
    damaged = DataError(f"{path} has a damaged header; copy it again, or pack it again")
    if _CRC.unpack_from(head, _FIXED.size)[0] != zlib.crc32(zeroed):
        raise damaged
    try:
        origin = _decode_origin(head[_JSON_BEGIN : _JSON_BEGIN + length])
    except (ValueError, TypeError, KeyError) as error:
        raise damaged from error
    if width != origin.width or bool(flags) != (origin.rendering is not None):
        raise damaged
    return Layout(width, tokens, documents, bool(flags)), origin


def encode_footer(layout: Layout, crcs: bytes) -> bytes:
    """The last 40 bytes; `crcs` are the CRCs of the blocks as they are stored."""
    text = _FOOTER.pack(layout.ends_begin, layout.crcs_begin, layout.blocks, zlib.crc32(crcs))
    return text + _CRC.pack(zlib.crc32(text)) + END_MAGIC


def _encode_origin(origin: Origin) -> bytes:
    values = asdict(origin)
    if origin.rendering is None:  # files of texts have it not
        del values["rendering"]
    return json.dumps(values, sort_keys=True).encode()


def _decode_origin(text: bytes) -> Origin:
    """What `_encode_origin` gave; raises ValueError, TypeError or KeyError of anything else."""
    values: dict[str, Any] = json.loads(text)
    rendering = values.get("rendering")
    values["rendering"] = rendering and Rendering(**rendering)
    return Origin(**{**values, "names": tuple(values["names"])})
