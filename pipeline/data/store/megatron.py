r"""Megatron's indexed data sets: X.bin, the tokens, and X.idx, where documents lie in it.

    X.idx  magic "MMIDIDX\0\0" | version u64 (1) | code of the tokens' type u8 | sequences u64
           | documents + 1 u64 | lengths in tokens i32 each | begins in bytes i64 each
           | first sequence of each document i64 each, and one past the last

Source: `IndexedDataset` of Megatron-Core. Modes, which may follow, are not read.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.store.reader import TokenFile
from pipeline.errors import DataError
from pipeline.files.durable import rename_durably

MAGIC = b"MMIDIDX\x00\x00"
TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
SMALL_VOCABULARY = 65500
"""Below it Megatron stores u16, else i32."""

_HEADER = struct.Struct("<9sQBQQ")
PART = 2**20


def read_megatron(path: Path) -> Iterator[NDArray[Any]]:
    """The documents of `X.idx` and `X.bin`, views of the file: [tokens] each.

    Raises:
        DataError: a file is missing, cut off or of another format.
    """
    index, data = path.with_suffix(".idx"), path.with_suffix(".bin")
    try:
        size, data_size = index.stat().st_size, data.stat().st_size
        with index.open("rb") as file:
            head = file.read(_HEADER.size)
    except OSError as error:
        raise DataError(f"{error.filename} can't be read: {error.strerror}") from error
    if len(head) < _HEADER.size or not head.startswith(MAGIC):
        raise DataError(f"{index} is not an index of Megatron's")
    _, version, code, sequences, documents = _HEADER.unpack(head)
    if version != 1 or code not in TYPES:
        raise DataError(f"{index} has version {version} and type {code} of tokens, which is none")
    dtype = np.dtype(TYPES[code])
    if size < _HEADER.size + 12 * sequences + 8 * documents or data_size % dtype.itemsize:
        raise DataError(f"{index} or {data} was not copied whole; copy them again")
    if not sequences:
        return
    whole = np.memmap(index, np.uint8, "r")
    lengths = np.frombuffer(whole, "<i4", sequences, _HEADER.size)
    begins = np.frombuffer(whole, "<i8", sequences, _HEADER.size + 4 * sequences)
    firsts = np.frombuffer(whole, "<i8", documents, _HEADER.size + 12 * sequences)
    tokens = np.memmap(data, dtype, "r") if data_size else np.zeros(0, dtype)
    for document in range(documents - 1):
        first, last = int(firsts[document]), int(firsts[document + 1])
        if not 0 <= first <= last <= sequences:
            raise DataError(f"{index} is damaged: document {document:,} has no such sequences")
        parts = [
            _sequence(index, tokens, int(begins[n]), int(lengths[n])) for n in range(first, last)
        ]
        yield parts[0] if len(parts) == 1 else np.concatenate([tokens[:0], *parts])


def _sequence(index: Path, tokens: NDArray[Any], begin: int, length: int) -> NDArray[Any]:
    start, odd = divmod(begin, tokens.itemsize)
    if odd or start < 0 or length < 0 or start + length > len(tokens):
        raise DataError(f"{index} names tokens that its .bin does not have; copy both again")
    return tokens[start : start + length]


def write_megatron(file: TokenFile, out: Path) -> None:
    """Write `out`.bin and `out`.idx, a sequence for each document, each block checked.

    Raises:
        DataError: a block is damaged, a document too long for the format, or they are dialogues.
    """
    if file.has_marks:
        raise DataError(
            f"{file.path} holds dialogues, and Megatron's format has no place for which tokens are"
            " learned; convert token files of texts"
        )
    code = 8 if file.origin.vocabulary < SMALL_VOCABULARY else 4
    dtype = np.dtype(TYPES[code])
    targets = [Path(f"{out}.bin"), Path(f"{out}.idx")]
    halves = [path.with_name(path.name + ".writing") for path in targets]
    try:
        with halves[0].open("wb") as data:
            for start in range(0, file.layout.tokens, PART):
                ids = file.slice(start, min(start + PART, file.layout.tokens))
                data.write(ids.astype(dtype).data)
                file.release()
            os.fsync(data.fileno())
        with halves[1].open("wb") as index:
            count = file.documents
            index.write(_HEADER.pack(MAGIC, 1, code, count, count + 1))
            for first, ends in _ends(file):
                lengths = np.diff(ends, prepend=first)
                if lengths.max() >= 2**31:
                    raise DataError(f"{file.path} has a document of more than 2^31 tokens")
                index.write(lengths.astype("<i4").data)
            for first, ends in _ends(file):
                begins = np.concatenate([[first], ends[:-1]]) * dtype.itemsize
                index.write(begins.astype("<i8").data)
            for start in range(0, count + 1, PART):
                index.write(np.arange(start, min(start + PART, count + 1), dtype="<i8").data)
            os.fsync(index.fileno())
        for half, target in zip(halves, targets, strict=True):
            rename_durably(half, target)
    finally:
        for half in halves:
            half.unlink(missing_ok=True)


def _ends(file: TokenFile) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The ends of documents in parts, each with the end before it."""
    first = 0
    for start in range(0, file.documents, PART):
        ends = file.ends(start, min(start + PART, file.documents)).astype(np.int64)
        yield first, ends
        first = int(ends[-1])
