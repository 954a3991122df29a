"""A token file in several: stretches of the same size, or documents by their own tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.data.prompt_hash import draw
from pipeline.data.store.document_hash import document_hash
from pipeline.data.store.documents import Documents, parts_of
from pipeline.data.store.layout import Layout
from pipeline.data.store.reader import TokenFile
from pipeline.data.store.writer import TokenWriter
from pipeline.errors import DataError

Assign = Callable[[int, Documents], NDArray[np.int64]]
"""The part of each document; the first of them has that number."""


@dataclass(frozen=True)
class Parts:
    """How documents are shared out."""

    count: int
    assign: Assign


def equal_parts(file: TokenFile, count: int) -> Parts:
    """Stretches of documents that follow one another, with nearly the same number of tokens."""

    def assign(first: int, documents: Documents) -> NDArray[np.int64]:
        begins = file.span(first)[0] + np.cumsum(documents.lengths) - documents.lengths
        return begins * count // file.layout.tokens

    return Parts(count, assign)


def shared_parts(file: TokenFile, shares: Sequence[float], *, seed: int) -> Parts:
    """Parts in proportion to `shares`, by a hash of each document: copies are in one part.

    Of dialogues it is the hash of the prompt: all that begin alike are in one part.
    """
    bounds = np.cumsum(shares) / sum(shares)

    def assign(first: int, documents: Documents) -> NDArray[np.int64]:
        if documents.marks is not None:
            hashes = documents.marks.records["prompt"].tolist()
        else:
            hashes = [document_hash(file, first + n) for n in range(len(documents.lengths))]
        draws = [draw(each, seed=seed, purpose="part") for each in hashes]
        return np.minimum(np.searchsorted(bounds, draws, side="right"), len(shares) - 1)

    return Parts(len(shares), assign)


def chunk(
    file: TokenFile, out: Path, parts: Parts, *, only: int | None = None
) -> dict[Path, Layout]:
    """Write the parts, or one of them; each block is checked.

    Raises:
        DataError: a block is damaged, or a part has no documents.
    """
    wanted = range(parts.count) if only is None else [only]
    paths = {part: part_path(out, part, parts.count) for part in wanted}
    with ExitStack() as stack:
        writers = {
            part: stack.enter_context(TokenWriter(path, file.layout.width, marked=file.has_marks))
            for part, path in paths.items()
        }
        try:
            for part, documents in _assigned(file, parts):
                if part in writers:
                    writers[part].append(documents.ids, documents.lengths, documents.marks)
            _check_filled(file, writers)
            return {writer.path: writer.finish(file.origin) for writer in writers.values()}
        except BaseException:
            for writer in writers.values():
                writer.discard()
            raise


def _check_filled(file: TokenFile, writers: Mapping[int, TokenWriter]) -> None:
    for part, writer in writers.items():
        if not writer.documents:
            raise DataError(
                f"part {part} of {file.path} has no documents: there are {file.documents:,} in all;"
                " take fewer parts, or a larger share"
            )


def part_path(out: Path, part: int, count: int) -> Path:
    """`c-00003-of-00008.tokens` of `c.tokens`."""
    return out.with_name(f"{out.stem}-{part:05}-of-{count:05}{out.suffix}")


def _assigned(file: TokenFile, parts: Parts) -> Iterator[tuple[int, Documents]]:
    for first, documents in parts_of(file):
        assigned = parts.assign(first, documents)
        for part in np.unique(assigned).tolist():
            yield part, documents.chosen(np.flatnonzero(assigned == part))
