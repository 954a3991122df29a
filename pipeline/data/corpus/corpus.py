"""The corpus of a step: its rows in their order, and those held out."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import TextDataConfig
from pipeline.data.corpus.held_out import Chosen, cut_rows, given_rows
from pipeline.data.corpus.paths import CorpusPath, evaluation_paths, training_paths
from pipeline.data.corpus.prepare import targets
from pipeline.data.corpus.rows import ROWS, FileRows, TokenRow
from pipeline.data.corpus.stream import MixedStream
from pipeline.data.store.reader import TokenFile
from pipeline.data.store.vocabulary import Vocabulary
from pipeline.errors import DataError


@dataclass(frozen=True)
class Reading:
    """How token files are read for a model."""

    data: TextDataConfig

    vocabulary: Vocabulary
    """Of the model's tokenizer."""

    bos: int | None
    """The token that the tokenizer puts in front of a text, if it does."""

    directory: Path
    """Where what was not a token file has become one."""


@dataclass(frozen=True)
class Corpus:
    """What a step learns from, and is evaluated on."""

    files: Sequence[FileRows]
    stream: MixedStream
    chosen: Chosen
    fingerprint: str
    """The same for the same tokens, mixed alike, and for no others."""

    notes: Sequence[str]

    def next_rows(self) -> list[TokenRow]:
        """The rows of the next global batch, with documents that are held out."""
        for rows in self.files:
            rows.file.release()  # so that memory does not grow with what was read
        return [self.files[file][row] for file, row in next(self.stream)]


def open_corpus(reading: Reading, *, batch_size: int, seed: int) -> Corpus:
    """The corpus, where every path has become token files.

    Raises:
        DataError: a file can't be used, is of another tokenizer, or nothing is left to train on.
    """
    data, paths = reading.data, training_paths(reading.data)
    opened = [[_rows(file, reading) for file in _files(path, reading)] for path in paths]
    files = [rows for each in opened for rows in each]
    weights = _weights(paths, opened)
    if data.eval_path:
        given = [file for path in evaluation_paths(reading.data) for file in _files(path, reading)]
        rows = [_rows(file, reading) for file in given]
        chosen = given_rows(rows, most=data.max_eval_rows, seed=data.seed)
    else:
        chosen = cut_rows(
            files,
            weights,
            fraction=data.eval_fraction,
            most=data.max_eval_rows,
            seed=data.seed,
        )
    stream = MixedStream([len(rows) for rows in files], weights, batch_size=batch_size, seed=seed)
    return Corpus(files, stream, chosen, _fingerprint(files, weights), _notes(files, weights, data))


def open_files(paths: Sequence[CorpusPath], reading: Reading) -> list[TokenFile]:
    """The paths that are token files already, open; their tokenizer must be the model's.

    Raises:
        DataError: it is another, or a file can't be read.
    """
    return [
        _opened(file, reading.vocabulary)
        for path in paths
        if path.kind == "tokens"
        for file in path.files
    ]


def _files(path: CorpusPath, reading: Reading) -> list[TokenFile]:
    found = targets(path, reading.vocabulary, reading.directory, field=reading.data.field)
    return [_opened(file, reading.vocabulary) for file in found]


def _opened(path: Path, vocabulary: Vocabulary) -> TokenFile:
    file = TokenFile(path)
    if file.origin.tokenizer_hash != vocabulary.hash:
        raise DataError(
            f"{path} was packed with the tokenizer {file.origin.tokenizer}, and {vocabulary.name}"
            f" has another; pack the text again with --tokenizer {vocabulary.name}"
        )
    if file.has_marks:
        raise DataError(
            f"{path} holds dialogues, on which step 1 trains; step 0 learns every token of texts,"
            " which `python -m pipeline.data.store pack` packs without --rows dialogues"
        )
    if not file.documents:
        raise DataError(f"{path} has no documents; pack it again")
    return file


def _rows(file: TokenFile, reading: Reading) -> FileRows:
    return ROWS[reading.data.packing](file, reading.data.max_length, reading.bos)


def _weights(paths: Sequence[CorpusPath], opened: Sequence[Sequence[FileRows]]) -> list[float]:
    """The share of each file: of its path's weight by its rows; without weights its rows."""
    unweighted = all(path.weight is None for path in paths)
    weights: list[float] = []
    for path, files in zip(paths, opened, strict=True):
        total = sum(map(len, files))
        weight = total if unweighted else 1.0 if path.weight is None else path.weight
        weights += [weight * len(rows) / total for rows in files]
    return weights


def _fingerprint(files: Sequence[FileRows], weights: Sequence[float]) -> str:
    described = [
        [rows.file.layout.tokens, rows.file.documents, rows.file.checksum, len(rows), weight]
        for rows, weight in zip(files, weights, strict=True)
    ]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]


def _notes(files: Sequence[FileRows], weights: Sequence[float], data: TextDataConfig) -> list[str]:
    total = sum(weights)
    return [
        f"{rows.file.path}: {rows.file.documents:,} documents, {rows.file.layout.tokens:,} tokens,"
        f" {len(rows):,} {data.packing} of up to {data.max_length}, {weight / total:.1%} of the mix"
        for rows, weight in zip(files, weights, strict=True)
    ]
