"""The corpus of step 0: its files, their rows in order, and the documents held out.

A document is held out by a hash of its tokens and `data.seed`, whatever the other documents, their
order and the file: copies are on the same side, and a corpus that grows moves none.
"""

import glob
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import RowCounts, TextDataConfig
from pipeline.data.rows.sources import split_weight
from pipeline.data.sharing.prompts import draw
from pipeline.data.store.order import MixedStream, Permutation
from pipeline.data.store.pack import SUFFIXES as TEXTS
from pipeline.data.store.pack import pack
from pipeline.data.store.rows import ROWS, FileRows, TokenRow
from pipeline.data.store.token_file import TokenFile, index_path
from pipeline.data.store.vocabulary import Vocabulary, vocabulary_of
from pipeline.system.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PACKED = "tokens"
"""Directory of packed texts, in that of the step."""

WORKER_BYTES = 16 * 2**20
"""Text per worker process."""

MOST_BYTES = 2**30
"""Text that a step packs itself, while its other processes wait."""

HASHED = 4096
"""Tokens of a document that its hash covers, from the first."""


@dataclass(frozen=True)
class CorpusPath:
    """The files that a data path names, all token files or all texts."""

    name: str
    weight: float | None
    files: tuple[Path, ...]
    is_text: bool


@dataclass(frozen=True)
class Reading:
    """How a corpus is read for a model."""

    data: TextDataConfig
    vocabulary: Vocabulary
    bos: int | None
    """Token that the tokenizer puts before a text; None if it does not."""

    directory: Path
    """Directory of packed texts."""


def reading_of(
    data: TextDataConfig, tokenizer: "PreTrainedTokenizerBase", *, model: str, output_dir: Path
) -> Reading:
    """Return how the corpus is read for a model with this tokenizer.

    Raises:
        DataError: it has no fast form, or no end-of-sequence token.
    """
    vocabulary = vocabulary_of(tokenizer, model)
    first, *_ = tokenizer.encode("a")
    bos = first if first == tokenizer.bos_token_id else None
    return Reading(data, vocabulary, bos, output_dir / PACKED)


def find_paths(data: TextDataConfig, tokenizer: str) -> tuple[list[CorpusPath], list[CorpusPath]]:
    """Find the files of `data.path` and of `data.eval_path`.

    Raises:
        DataError: a path names nothing, a directory, files of an unknown kind or of two kinds; or
            there is more text than a step packs itself.
    """
    if not data.path:
        raise DataError(
            "data.path names no corpus; give token files, which `python -m pipeline.data.store"
            " pack` writes, or text (.jsonl, .txt)"
        )
    train = [_find(spec, "data.path") for spec in data.path]
    held_out = [_find(spec, "data.eval_path") for spec in data.eval_path]
    texts = [path for path in (*train, *held_out) if path.is_text]
    size = sum(file.stat().st_size for path in texts for file in path.files)
    if size > MOST_BYTES:
        names = " ".join(f"'{path.name}'" for path in texts)
        raise DataError(
            f"{names}: pack {size / 2**30:.1f} GiB of text once for all runs, with `python -m"
            f" pipeline.data.store pack {names} --tokenizer {tokenizer} --out X --workers N`, and"
            " give X"
        )
    return train, held_out


def _find(spec: str, setting: str) -> CorpusPath:
    name, weight = split_weight(spec)
    path = Path(name).expanduser()
    if path.is_dir():
        raise DataError(f"{setting} {path} is a directory; name its files, as in '{path}/*.bin'")
    if index_path(path).exists():
        return CorpusPath(name, weight, (path,), is_text=False)
    files = [path] if path.exists() else [Path(each) for each in sorted(_matches(path))]
    if not files:
        raise DataError(f"{setting} {name}: there is no such file")
    kinds = {_is_text(file, setting) for file in files}
    if len(kinds) > 1:
        raise DataError(f"{setting} {name} names token files and texts; give a path for each")
    is_text = kinds.pop()
    if not is_text:  # both files of Megatron's may match
        files = sorted(
            {file.with_suffix(".bin") if file.suffix == ".idx" else file for file in files}
        )
    return CorpusPath(name, weight, tuple(files), is_text)


def _matches(path: Path) -> list[str]:
    return glob.glob(str(path), recursive=True)  # noqa: PTH207


def _is_text(path: Path, setting: str) -> bool:
    if path.suffix in (".bin", ".idx", ".pbin"):
        return False
    if path.name.endswith(TEXTS):
        return True
    raise DataError(
        f"{setting} {path} is not a corpus; give Megatron's .bin and .idx, Modalities' .pbin, or"
        f" text ({', '.join(TEXTS)})"
    )


def prepare(reading: Reading) -> None:
    """Pack the texts that have not been packed yet.

    Raises:
        DataError: a file can't be used.
    """
    train, held_out = find_paths(reading.data, reading.vocabulary.name)
    for path in (path for path in (*train, *held_out) if path.is_text):
        target = _packed(path, reading)
        if index_path(target).exists():
            continue
        size = sum(file.stat().st_size for file in path.files)
        packed = pack(
            path.files,
            reading.vocabulary,
            target,
            field=reading.data.field,
            workers=max(1, min(os.cpu_count() or 1, size // WORKER_BYTES)),
            resume=True,
        )
        documents, tokens = packed.file.documents, len(packed.file.ids)
        logger.info(
            "packed %s as %s: %s documents, %s tokens, %.1f s",
            path.name,
            target,
            f"{documents:,}",
            f"{tokens:,}",
            packed.seconds,
        )


def _packed(path: CorpusPath, reading: Reading) -> Path:
    """The token file of texts, named by all that decides its content."""
    stats = [(str(file.absolute()), file.stat()) for file in path.files]
    sources = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    made_of = f"{sources} {reading.vocabulary.hash} {reading.data.field}"
    digest = hashlib.sha256(made_of.encode()).hexdigest()[:12]
    return reading.directory / f"{path.files[0].name.partition('.')[0]}-{digest}"


class HeldOut:
    """Documents that are not trained on: those with given hashes, or with a small draw."""

    def __init__(
        self, *, seed: int, up_to: float = 0.0, hashes: frozenset[int] = frozenset()
    ) -> None:
        self.seed, self.up_to, self.hashes = seed, up_to, hashes
        self.contains = lru_cache(maxsize=2**16)(self._contains)
        """Whether a document of a file is held out."""

    def _contains(self, file: TokenFile, document: int) -> bool:
        number = document_hash(file, document)
        return number in self.hashes or _held_out_draw(number, self.seed) <= self.up_to


def document_hash(file: TokenFile, document: int) -> int:
    """64 bits that depend on the document's tokens alone."""
    start, end = file.span(document)
    ids = file.slice(start, min(end, start + HASHED)).astype("<u4")
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little")


def _held_out_draw(number: int, seed: int) -> float:
    return draw(number, seed=seed, purpose="held out")


@dataclass(frozen=True)
class Corpus:
    """Rows of step 0, for training and for evaluation."""

    files: Sequence[FileRows]
    stream: MixedStream
    eval_rows: Sequence[TokenRow]
    held_out: HeldOut
    fingerprint: str
    """The same for the same tokens in the same mixture."""

    notes: Sequence[str]

    def next_rows(self) -> list[TokenRow]:
        """Rows of the next global batch, including held-out documents."""
        for rows in self.files:
            rows.file.release()  # so that memory does not grow with what was read
        return [self.files[file][row] for file, row in next(self.stream)]

    def counts(self) -> RowCounts:
        """Numbers of rows, and the mean tokens of one."""
        total = sum(self.stream.weights)
        tokens = sum(
            weight / total * len(rows.file.ids) / len(rows)
            for rows, weight in zip(self.files, self.stream.weights, strict=True)
        )
        return RowCounts(
            train=self.stream.num_rows,
            held_out=len(self.eval_rows),
            tokens=tokens,
            notes=tuple(self.notes),
        )


def count_rows(reading: Reading, *, batch_size: int, seed: int) -> RowCounts:
    """Count the rows of a run, as far as that is possible without packing.

    Raises:
        DataError: a file can't be used, or has another tokenizer.
    """
    paths = [path for paths in find_paths(reading.data, reading.vocabulary.name) for path in paths]
    for path in paths:
        if not path.is_text:
            _open(path, reading)
    if texts := [path.name for path in paths if path.is_text]:
        return RowCounts(unread=f"{' '.join(texts)} packed when the run begins")
    return open_corpus(reading, batch_size=batch_size, seed=seed).counts()


def open_corpus(reading: Reading, *, batch_size: int, seed: int) -> Corpus:
    """Open the corpus, whose texts are packed.

    Raises:
        DataError: a file can't be used, has another tokenizer, or nothing is left to train on.
    """
    data = reading.data
    paths, eval_paths = find_paths(data, reading.vocabulary.name)
    opened = [_open(path, reading) for path in paths]
    files = [rows for each in opened for rows in each]
    weights = _weights(paths, opened)
    if eval_paths:
        given = [rows for path in eval_paths for rows in _open(path, reading)]
        eval_rows = _rows_of(given, most=data.max_eval_rows, seed=data.seed)
        hashes = {document_hash(row.file, span.document) for row in eval_rows for span in row.spans}
        held_out = HeldOut(seed=data.seed, hashes=frozenset(hashes))
    else:
        eval_rows, held_out = _hold_out(files, weights, data)
    stream = MixedStream([len(rows) for rows in files], weights, batch_size=batch_size, seed=seed)
    described = [
        [rows.file.fingerprint(), len(rows), weight]
        for rows, weight in zip(files, weights, strict=True)
    ]
    fingerprint = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]
    return Corpus(files, stream, eval_rows, held_out, fingerprint, _notes(files, weights, data))


def _open(path: CorpusPath, reading: Reading) -> list[FileRows]:
    kind = ROWS[reading.data.packing]
    names = [_packed(path, reading)] if path.is_text else path.files
    files = [TokenFile(name) for name in names]
    for file in files:
        _check_tokenizer(file, reading.vocabulary)
    return [kind(file, reading.data.max_length, reading.bos) for file in files]


def _check_tokenizer(file: TokenFile, vocabulary: Vocabulary) -> None:
    if file.origin is not None and file.origin.tokenizer_hash != vocabulary.hash:
        raise DataError(
            f"{file.path} was packed with the tokenizer {file.origin.tokenizer}, and"
            f" {vocabulary.name} has another; pack the text again with --tokenizer"
            f" {vocabulary.name}"
        )
    if file.origin is None and any(
        len(ids) and (ids.max() >= vocabulary.size or ids.min() < 0) for ids, _ in file.chunks()
    ):
        raise DataError(
            f"{file.path} has ids that the tokenizer {vocabulary.name} does not have; pack the text"
            f" again with --tokenizer {vocabulary.name}"
        )


def _weights(paths: Sequence[CorpusPath], opened: Sequence[Sequence[FileRows]]) -> list[float]:
    """Share of each file: its path's weight, divided by rows; its rows if no path has a weight."""
    unweighted = all(path.weight is None for path in paths)
    weights: list[float] = []
    for path, files in zip(paths, opened, strict=True):
        total = sum(map(len, files))
        weight = total if unweighted else 1.0 if path.weight is None else path.weight
        weights += [weight * len(rows) / total for rows in files]
    return weights


def _rows_of(files: Sequence[FileRows], *, most: int, seed: int) -> list[TokenRow]:
    """Random rows of evaluation files, in proportion to their sizes."""
    total = sum(len(rows) for rows in files)
    chosen: list[TokenRow] = []
    for number, rows in enumerate(files):
        count = min(len(rows), max(1, round(most * len(rows) / total)))
        order = Permutation(len(rows), f"{seed} evaluation {number}")
        chosen += [rows[order[position]] for position in range(count)]
    return chosen[:most]


def _hold_out(
    files: Sequence[FileRows], weights: Sequence[float], data: TextDataConfig
) -> tuple[list[TokenRow], HeldOut]:
    """Rows of held-out documents, from each file by its weight.

    If no document has a draw up to `eval_fraction`, as in a small corpus, the smallest is taken.
    """
    up_to, most = data.eval_fraction, data.max_eval_rows
    counts = [max(1, round(most * weight / sum(weights))) for weight in weights]
    draws = [
        _draws(rows, up_to, count, data.seed) for rows, count in zip(files, counts, strict=True)
    ]
    up_to = max(up_to, min(min(each.values()) for each in draws))
    chosen = [[document for document, number in each.items() if number <= up_to] for each in draws]
    if all(len(each) == rows.file.documents for each, rows in zip(chosen, files, strict=True)):
        names = " ".join(str(rows.file.path) for rows in files)
        raise DataError(
            f"{names}: all documents would be held out for evaluation; give data.eval_path, or more"
            " documents"
        )
    eval_rows = [
        row
        for rows, documents, count in zip(files, chosen, counts, strict=True)
        for row in islice(rows.cut(_whole(rows.file, documents)), count)
    ]
    return eval_rows[:most], HeldOut(seed=data.seed, up_to=up_to)


def _draws(rows: FileRows, up_to: float, count: int, seed: int) -> dict[int, float]:
    """Draws of documents in random order, until enough are held out for `count` rows."""
    file, missing = rows.file, count * rows.room
    order = Permutation(file.documents, f"{seed} evaluation")
    draws: dict[int, float] = {}
    for position in range(file.documents):
        document = order[position]
        number = _held_out_draw(document_hash(file, document), seed)
        if number <= up_to:
            start, end = file.span(document)
            missing -= end - start
        if number <= up_to or number <= min(draws.values(), default=2.0):
            draws[document] = number
        if missing <= 0:
            break
    file.release()
    return draws


def _whole(file: TokenFile, documents: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    for document in documents:
        yield document, *file.span(document)


def _notes(files: Sequence[FileRows], weights: Sequence[float], data: TextDataConfig) -> list[str]:
    total = sum(weights)
    return [
        f"{rows.file.path}: {rows.file.documents:,} documents, {len(rows.file.ids):,} tokens,"
        f" {len(rows):,} {data.packing} of up to {data.max_length}, {weight / total:.1%} of the mix"
        for rows, weight in zip(files, weights, strict=True)
    ]
