"""Every byte of a token file, looked at."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pipeline.data.store.reader import TokenFile

PART = 2**20
"""Tokens or documents looked at together."""


def findings(file: TokenFile) -> Iterator[str]:
    """What is wrong with the file, in sentences: damaged blocks, else ends and ids that can't be.

    Memory does not grow with the file.
    """
    damaged = False
    for block in file.damaged_blocks():
        damaged = True
        yield file.damage(block)
    if damaged:
        return
    yield from _wrong_ends(file)
    yield from _wrong_ids(file)


def _wrong_ends(file: TokenFile) -> Iterator[str]:
    last = 0
    for start in range(0, file.documents, PART):
        ends = file.ends(start, min(start + PART, file.documents)).astype(np.int64)
        empty = np.diff(ends, prepend=last) <= 0
        if empty.any():
            yield f"{file.path}: document {start + int(np.argmax(empty)):,} has no tokens"
            return
        if ends[-1] > file.layout.tokens:
            number = start + int(np.argmax(ends > file.layout.tokens))
            yield f"{file.path}: document {number:,} ends after the last token"
            return
        first, last = int(ends[0]), int(ends[-1])
        if file.has_marks:
            yield from _wrong_marks(file, start, ends)
            file.release()
            continue
        unended = file.slice(first - 1, last)[ends - first] != file.origin.eos
        if unended.any():
            number = start + int(np.argmax(unended))
            yield f"{file.path}: document {number:,} does not end with eos, {file.origin.eos}"
            return
        file.release()
    if last != file.layout.tokens:
        yield f"{file.path}: its last document ends at token {last:,} of {file.layout.tokens:,}"


def _wrong_marks(file: TokenFile, start: int, ends: NDArray[np.int64]) -> Iterator[str]:
    """Dialogues end with the token that ends a turn, whichever that is, but learn no first token.

    Args:
        file: of dialogues.
        start: number of the first document.
        ends: of the documents: [documents].
    """
    begins = np.append(file.span(start)[0], ends[:-1])
    learned = file.is_trained(begins)
    if learned.any():
        number = start + int(np.argmax(learned))
        yield f"{file.path}: document {number:,} learns its first token, predicted from nothing"


def _wrong_ids(file: TokenFile) -> Iterator[str]:
    size = file.origin.vocabulary
    for start in range(0, file.layout.tokens, PART):
        ids = file.slice(start, min(start + PART, file.layout.tokens))
        if (wrong := ids >= size).any():
            number = start + int(np.argmax(wrong))
            yield (
                f"{file.path}: token {number:,} is {int(ids[number - start]):,}, and the vocabulary"
                f" has {size:,}"
            )
            return
        file.release()
