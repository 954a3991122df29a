"""Several token files in one, streamed."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipeline.data.store.layout import Layout, Origin
from pipeline.data.store.reader import TokenFile
from pipeline.data.store.writer import TokenWriter
from pipeline.errors import DataError

PART = 2**20
"""Tokens, and documents, that are in memory at a time."""


def merge(files: Sequence[TokenFile], out: Path) -> Layout:
    """Write the documents of the files, one file after the other, each block checked.

    Raises:
        DataError: the files are of different tokenizers, or a block is damaged.
    """
    origin = merged_origin(files)
    with TokenWriter(out, origin.width) as writer:
        try:
            for file in files:
                for start, end in _parts(file.layout.tokens):
                    writer.append(file.slice(start, end), np.zeros(0, np.uint64))
                    file.release()
                _copy_ends(file, writer)
            return writer.finish(origin)
        except BaseException:
            writer.discard()
            raise


def merged_origin(files: Sequence[TokenFile]) -> Origin:
    """What the header of the merged file says.

    Raises:
        DataError: the files are of different tokenizers.
    """
    first = files[0]
    for file in files[1:]:
        if file.origin.tokenizer_hash != first.origin.tokenizer_hash:
            raise DataError(
                f"{file.path} was packed with another tokenizer ({file.origin.tokenizer}) than"
                f" {first.path} ({first.origin.tokenizer}); pack them with the same one"
            )
    origins = [file.origin for file in files]
    fields = sorted({origin.field for origin in origins})
    return replace(
        first.origin,
        field=" ".join(fields),
        files=sum(origin.files for origin in origins),
        bytes=sum(origin.bytes for origin in origins),
        sources=hashlib.sha256("".join(each.sources for each in origins).encode()).hexdigest(),
        names=tuple(name for origin in origins for name in origin.names),
        bad_rows=sum(origin.bad_rows for origin in origins),
    )


def _copy_ends(file: TokenFile, writer: TokenWriter) -> None:
    offset = writer.tokens - file.layout.tokens
    for start, end in _parts(file.documents):
        writer.append_ends(file.ends(start, end) + np.uint64(offset))


def _parts(count: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, PART):
        yield start, min(start + PART, count)
