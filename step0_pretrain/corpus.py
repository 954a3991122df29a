"""The corpus of step 0: training and evaluation rows from token files."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import TYPE_CHECKING

from pipeline.config import TextDataConfig
from pipeline.data.store.corpus import CorpusPath, HeldOut, document_hash, find_paths
from pipeline.data.store.rows import MixedStream, TokenRow, Windows
from pipeline.data.store.token_file import TokenFile, Vocabulary, read_vocabulary
from pipeline.system.errors import DataError, counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SEARCHED = 2**20
"""Maximum number of documents per file that are searched for evaluation documents."""


@dataclass(frozen=True)
class CorpusSettings:
    """Settings for reading a corpus for a model."""

    data: TextDataConfig
    vocabulary: Vocabulary
    bos: int | None
    """Id of the token that the tokenizer prepends to text; None if it prepends none."""

    @classmethod
    def for_model(
        cls, data: TextDataConfig, tokenizer: "PreTrainedTokenizerBase", *, model: str
    ) -> "CorpusSettings":
        """Return the settings for reading a corpus with the tokenizer of a model.

        Raises:
            DataError: the tokenizer is not fast, or has no end-of-sequence token.
        """
        vocabulary = read_vocabulary(tokenizer, model)
        first, *_ = tokenizer.encode("a")
        return cls(data, vocabulary, first if first == tokenizer.bos_token_id else None)


@dataclass(frozen=True)
class Corpus:
    """Training and evaluation rows of step 0."""

    files: Sequence[Windows]
    stream: MixedStream
    eval_rows: Sequence[TokenRow]
    held_out: HeldOut

    @property
    def fingerprint(self) -> str:
        """Hash of the tokens and the mixture."""
        descriptions = [
            [rows.file.fingerprint(), len(rows), weight]
            for rows, weight in zip(self.files, self.stream.weights, strict=True)
        ]
        return hashlib.sha256(json.dumps(descriptions).encode()).hexdigest()[:16]

    @property
    def notes(self) -> list[str]:
        """One line per file: its rows and its fraction of the mixture."""
        total = sum(self.stream.weights)
        return [
            f"{rows.file}, {counted(len(rows), 'row')} of up to {rows.max_length} tokens,"
            f" {weight / total:.1%} of the mixture"
            for rows, weight in zip(self.files, self.stream.weights, strict=True)
        ]

    def next_rows(self) -> list[TokenRow]:
        """Return the rows of the next global batch; they may contain held-out documents."""
        for rows in self.files:
            rows.file.release()  # keep resident memory bounded
        return [self.files[file][row] for file, row in next(self.stream)]


def open_corpus(settings: CorpusSettings, *, batch_size: int, seed: int) -> Corpus:
    """Open the corpus.

    Raises:
        DataError: a file can't be used or has a different tokenizer, or no documents remain.
    """
    data = settings.data
    paths = find_paths(data)
    files_by_path = [_open_files(path, settings) for path in paths]
    files = [rows for path_files in files_by_path for rows in path_files]
    # A path's weight is spread over its rows; if no path has a weight, all rows count equally.
    weighted = any(path.weight is not None for path in paths)
    weights: list[float] = []
    for path, path_files in zip(paths, files_by_path, strict=True):
        total = sum(map(len, path_files))
        weight = (1.0 if path.weight is None else path.weight) if weighted else total
        weights += [weight * len(rows) / total for rows in path_files]
    eval_rows, held_out = _hold_out(files, weights, data)
    stream = MixedStream([len(rows) for rows in files], weights, batch_size=batch_size, seed=seed)
    return Corpus(files, stream, eval_rows, held_out)


def _open_files(path: CorpusPath, settings: CorpusSettings) -> list[Windows]:
    files = [TokenFile(name) for name in path.files]
    vocabulary = settings.vocabulary
    for file in files:
        if file.origin is not None:
            is_compatible = file.origin.tokenizer_hash == vocabulary.hash
        else:
            is_compatible = all(
                not len(ids) or 0 <= ids.min() <= ids.max() < vocabulary.size
                for ids, _ in file.chunks()
            )
        if not is_compatible:
            raise DataError(
                f"{file.path} was not packed with the tokenizer {vocabulary.name}; pack the text"
                f" again with --tokenizer {vocabulary.name}"
            )
    return [Windows(file, settings.data.max_length, settings.bos) for file in files]


def _hold_out(
    files: Sequence[Windows], weights: Sequence[float], data: TextDataConfig
) -> tuple[list[TokenRow], HeldOut]:
    """Return evaluation rows, drawn from files by weight, and the test for held-out documents.

    A document is held out if its draw, a number from 0 to 1 computed from its hash, is at most
    `eval_fraction`. If there is no such document, the one with the smallest draw is held out.
    """
    max_rows, total = data.max_eval_rows, sum(weights)
    counts = [max(1, round(max_rows * weight / total)) for weight in weights]
    draws = [
        _find_smallest_draws(rows, count, data) for rows, count in zip(files, counts, strict=True)
    ]
    threshold = max(
        data.eval_fraction, min(draw for file_draws in draws for draw in file_draws.values())
    )
    eval_rows: list[TokenRow] = []
    num_held_out = 0
    for rows, count, file_draws in zip(files, counts, draws, strict=True):
        documents = [document for document, draw in file_draws.items() if draw <= threshold]
        eval_rows += islice(rows.fill_with(documents), count)
        num_held_out += len(documents)
    if num_held_out == sum(rows.file.num_documents for rows in files):
        names = " ".join(str(rows.file.path) for rows in files)
        raise DataError(f"{names}: all documents would be held out for evaluation; add documents")
    return eval_rows[:max_rows], HeldOut(seed=data.seed, threshold=threshold)


def _find_smallest_draws(rows: Windows, count: int, data: TextDataConfig) -> dict[int, float]:
    """Return draws of held-out documents for up to `count` rows, and the smallest draw found."""
    file, missing_tokens, held_out = rows.file, count * rows.max_length, HeldOut(seed=data.seed)
    num_searched = min(file.num_documents, MAX_SEARCHED)
    draws: dict[int, float] = {}
    rng = Random(f"{data.seed} evaluation")
    for document in rng.sample(range(file.num_documents), num_searched):
        draw = held_out.draw(document_hash(file, document))
        if draw <= data.eval_fraction or draw <= min(draws.values(), default=1.0):
            draws[document] = draw
        if draw <= data.eval_fraction:
            start, end = file.span(document)
            missing_tokens -= end - start
        if missing_tokens <= 0:
            break
    file.release()
    return draws
