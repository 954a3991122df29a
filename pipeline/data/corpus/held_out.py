"""Which documents are held out for evaluation, decided document by document.

A document is held out by a hash of its own tokens and `data.seed`: not by other documents, their
order, or the file it lies in. So copies of a document are all on one side, and a corpus that grows
moves none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from pipeline.data.corpus.permutation import Permutation
from pipeline.data.corpus.rows import FileRows, Span, TokenRow
from pipeline.data.prompt_hash import draw
from pipeline.data.store.document_hash import document_hash
from pipeline.data.store.reader import TokenFile
from pipeline.errors import DataError

REMEMBERED = 2**16
"""Documents of which it is remembered whether they are held out."""


class HeldOut:
    """The documents that are not trained on: those of given hashes, or of a small draw."""

    def __init__(
        self, *, seed: int, up_to: float = 0.0, hashes: frozenset[int] = frozenset()
    ) -> None:
        self.seed, self.up_to, self.hashes = seed, up_to, hashes
        self.contains = lru_cache(maxsize=REMEMBERED)(self._contains)
        """Whether a document of a file is among them."""

    def _contains(self, file: TokenFile, document: int) -> bool:
        number = document_hash(file, document)
        return number in self.hashes or held_out_draw(number, self.seed) <= self.up_to


def held_out_draw(number: int, seed: int) -> float:
    """A number in (0, 1); a document is held out where it is no more than the fraction."""
    return draw(number, seed=seed, purpose="held out")


@dataclass(frozen=True)
class Chosen:
    """What evaluation reads, and what training leaves out."""

    rows: list[TokenRow]
    held_out: HeldOut


def given_rows(files: Sequence[FileRows], *, most: int, seed: int) -> Chosen:
    """Rows of files that are for evaluation alone, as many of each as it has of all.

    Documents of these rows that are among the training files too are not trained on.

    Raises:
        DataError: a block is damaged.
    """
    total = sum(len(rows) for rows in files)
    chosen: list[TokenRow] = []
    for number, rows in enumerate(files):
        count = min(len(rows), max(1, round(most * len(rows) / total)))
        order = Permutation(len(rows), f"{seed} evaluation {number}")
        chosen += [rows[order[place]] for place in range(count)]
    chosen = chosen[:most]
    hashes = {document_hash(row.file, span.document) for row in chosen for span in row.spans}
    return Chosen(chosen, HeldOut(seed=seed, hashes=frozenset(hashes)))


def cut_rows(
    files: Sequence[FileRows],
    weights: Sequence[float],
    *,
    fraction: float,
    most: int,
    seed: int,
) -> Chosen:
    """Rows of documents that are held out of the training files, of each file by its weight.

    Documents are looked at in a random order until there are enough. Where none has a draw up to
    `fraction`, as in a few documents, the one with the smallest is held out.

    Raises:
        DataError: nothing would be left to train on; or a block is damaged.
    """
    up_to = fraction
    counts = [max(1, round(most * weight / sum(weights))) for weight in weights]
    found = [_find(rows, up_to, count, seed) for rows, count in zip(files, counts, strict=True)]
    if not any(each.documents for each in found):
        up_to = min(each.smallest for each in found)
        found = [_find(rows, up_to, most, seed) for rows in files]
    if all(len(each.documents) == each.rows.file.documents for each in found):
        names = " ".join(str(rows.file.path) for rows in files)
        raise DataError(
            f"{names}: all documents would be held out for evaluation, and none be left to train"
            " on; give data.eval_path, or more documents"
        )
    chosen = [
        row
        for each, count in zip(found, counts, strict=True)
        for row in islice(_packed(each), count)
    ]
    return Chosen(chosen[:most], HeldOut(seed=seed, up_to=up_to))


@dataclass(frozen=True)
class _Found:
    """Documents of a file that are held out."""

    rows: FileRows
    documents: list[int]

    smallest: float
    """The smallest draw of all documents that were looked at."""


def _find(rows: FileRows, up_to: float, count: int, seed: int) -> _Found:
    """Documents with draws up to `up_to`, enough for `count` rows where there are that many."""
    file, missing = rows.file, count * rows.most
    order = Permutation(file.documents, f"{seed} evaluation")
    documents: list[int] = []
    smallest = 1.0
    for place in range(file.documents):
        number = held_out_draw(document_hash(file, order[place]), seed)
        smallest = min(smallest, number)
        if number <= up_to:
            documents.append(order[place])
            start, end = file.span(order[place])
            missing -= end - start
        if missing <= 0:
            break
    file.release()
    return _Found(rows, documents, smallest)


def _packed(found: _Found) -> Iterator[TokenRow]:
    """The documents one after the other, cut into rows as windows are."""
    rows, spans, room = found.rows, list[Span](), found.rows.most
    for document in found.documents:
        first, last = rows.file.span(document)
        start = first
        while start < last:
            end = min(last, start + room)
            spans.append(Span(document, start, end, start == first))
            room -= end - start
            start = end
            if not room:
                yield TokenRow(rows.file, tuple(spans), rows.bos)
                spans, room = [], rows.most
    if spans:
        yield TokenRow(rows.file, tuple(spans), rows.bos)
