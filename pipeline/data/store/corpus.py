"""The corpus of step 0: its files, their rows in order, and the documents held out.

A document is held out by a hash of its tokens and `data.seed`, regardless of the other documents,
their order and the file: copies are on the same side, and a corpus that grows moves none.
"""

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from glob import glob
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from pipeline.config import TextDataConfig
from pipeline.data.rows.sources import split_weight
from pipeline.data.sharing.prompts import draw
from pipeline.data.store.pack import SUFFIXES as TEXTS
from pipeline.data.store.pack import pack
from pipeline.data.store.rows import MixedStream, TokenRow, Windows
from pipeline.data.store.token_file import TokenFile, Vocabulary, part_path, read_vocabulary
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

LOOKED_AT = 2**20
"""Documents of a file among which those for evaluation are searched."""


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


def make_reading(
    data: TextDataConfig, tokenizer: "PreTrainedTokenizerBase", *, model: str, output_dir: Path
) -> Reading:
    """Return how the corpus is read for a model with this tokenizer.

    Raises:
        DataError: it has no fast form, or no end-of-sequence token.
    """
    vocabulary = read_vocabulary(tokenizer, model)
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
    if part_path(path, "idx").exists():
        return CorpusPath(name, weight, (path,), is_text=False)
    names = [str(path)] if path.exists() else glob(str(path), recursive=True)  # noqa: PTH207
    if not names:
        raise DataError(f"{setting} {name}: there is no such file")
    files = sorted(map(Path, names))
    if all(file.name.endswith(TEXTS) for file in files):
        return CorpusPath(name, weight, tuple(files), is_text=True)
    if not all(file.suffix in (".bin", ".idx", ".pbin") for file in files):
        raise DataError(
            f"{setting} {name} is not a corpus; give a path each for token files (Megatron's .bin"
            f" and .idx, Modalities' .pbin) and for text ({', '.join(TEXTS)})"
        )
    pairs = {file.with_suffix(".bin") if file.suffix == ".idx" else file for file in files}
    return CorpusPath(name, weight, tuple(sorted(pairs)), is_text=False)


def prepare(reading: Reading) -> None:
    """Pack the texts that have not been packed yet.

    Raises:
        DataError: a file can't be used.
    """
    train, held_out = find_paths(reading.data, reading.vocabulary.name)
    for path in (path for path in (*train, *held_out) if path.is_text):
        target = _packed(path, reading)
        if part_path(target, "idx").exists():
            continue
        size = sum(file.stat().st_size for file in path.files)
        file = pack(
            path.files,
            reading.vocabulary,
            target,
            field=reading.data.field,
            workers=max(1, min(os.cpu_count() or 1, size // WORKER_BYTES)),
            resume=True,
        )
        logger.info("packed %s as %s", path.name, file)


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
        return number in self.hashes or self.draw(number) <= self.up_to

    def draw(self, number: int) -> float:
        """Uniform number in (0, 1) for a document's hash."""
        return draw(number, seed=self.seed, purpose="held out")


def document_hash(file: TokenFile, document: int) -> int:
    """64 bits that depend on the document's tokens alone."""
    start, end = file.span(document)
    ids = file.slice(start, min(end, start + HASHED)).astype("<u4")
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Corpus:
    """Rows of step 0, for training and for evaluation."""

    files: Sequence[Windows]
    stream: MixedStream
    eval_rows: Sequence[TokenRow]
    held_out: HeldOut

    @property
    def fingerprint(self) -> str:
        """The same for the same tokens in the same mixture."""
        described = [
            [rows.file.fingerprint(), len(rows), weight]
            for rows, weight in zip(self.files, self.stream.weights, strict=True)
        ]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]

    @property
    def notes(self) -> list[str]:
        """A line for each file."""
        total = sum(self.stream.weights)
        return [
            f"{rows.file}, {len(rows):,} rows of up to {rows.room}, {weight / total:.1%} of the mix"
            for rows, weight in zip(self.files, self.stream.weights, strict=True)
        ]

    def next_rows(self) -> list[TokenRow]:
        """Rows of the next global batch, including held-out documents."""
        for rows in self.files:
            rows.file.release()  # so that memory does not grow with what was read
        return [self.files[file][row] for file, row in next(self.stream)]


def open_corpus(reading: Reading, *, batch_size: int, seed: int) -> Corpus:
    """Open the corpus, whose texts are packed.

    Raises:
        DataError: a file can't be used, has another tokenizer, or nothing is left to train on.
    """
    data = reading.data
    paths, eval_paths = find_paths(data, reading.vocabulary.name)
    opened = [_open(path, reading) for path in paths]
    files = [rows for of_path in opened for rows in of_path]
    # The weight of a path is divided by rows; without any weights, each row counts the same.
    weighted = any(path.weight is not None for path in paths)
    weights: list[float] = []
    for path, of_path in zip(paths, opened, strict=True):
        total = sum(map(len, of_path))
        weight = (1.0 if path.weight is None else path.weight) if weighted else total
        weights += [weight * len(rows) / total for rows in of_path]
    if eval_paths:
        eval_rows, held_out = _given(
            [rows for path in eval_paths for rows in _open(path, reading)], data
        )
    else:
        eval_rows, held_out = _hold_out(files, weights, data)
    stream = MixedStream([len(rows) for rows in files], weights, batch_size=batch_size, seed=seed)
    return Corpus(files, stream, eval_rows, held_out)


def _open(path: CorpusPath, reading: Reading) -> list[Windows]:
    files = [TokenFile(name) for name in ([_packed(path, reading)] if path.is_text else path.files)]
    vocabulary = reading.vocabulary
    for file in files:
        if file.origin is not None:
            fits = file.origin.tokenizer_hash == vocabulary.hash
        else:
            fits = all(
                not len(ids) or 0 <= ids.min() <= ids.max() < vocabulary.size
                for ids, _ in file.chunks()
            )
        if not fits:
            raise DataError(
                f"{file.path} was packed with another tokenizer than {vocabulary.name}; pack the"
                f" text again with --tokenizer {vocabulary.name}"
            )
    return [Windows(file, reading.data.max_length, reading.bos) for file in files]


def _given(files: Sequence[Windows], data: TextDataConfig) -> tuple[list[TokenRow], HeldOut]:
    """Random rows of evaluation files, in proportion to their sizes."""
    total = sum(len(rows) for rows in files)
    chosen: list[TokenRow] = []
    for number, rows in enumerate(files):
        count = min(len(rows), max(1, round(data.max_eval_rows * len(rows) / total)))
        numbers = Random(f"{data.seed} evaluation {number}").sample(range(len(rows)), count)
        chosen += [rows[row] for row in numbers]
    chosen = chosen[: data.max_eval_rows]
    hashes = {document_hash(row.file, span.document) for row in chosen for span in row.spans}
    return chosen, HeldOut(seed=data.seed, hashes=frozenset(hashes))


def _hold_out(
    files: Sequence[Windows], weights: Sequence[float], data: TextDataConfig
) -> tuple[list[TokenRow], HeldOut]:
    """Rows of held-out documents, from each file by its weight.

    If no document has a draw up to `eval_fraction`, as in a small corpus, the smallest is taken.
    """
    most, total = data.max_eval_rows, sum(weights)
    counts = [max(1, round(most * weight / total)) for weight in weights]
    draws = [_smallest_draws(rows, count, data) for rows, count in zip(files, counts, strict=True)]
    up_to = max(data.eval_fraction, min(number for of_file in draws for number in of_file.values()))
    eval_rows: list[TokenRow] = []
    num_chosen = 0
    for rows, count, of_file in zip(files, counts, draws, strict=True):
        documents = [document for document, number in of_file.items() if number <= up_to]
        eval_rows += islice(rows.of_documents(documents), count)
        num_chosen += len(documents)
    if num_chosen == sum(rows.file.documents for rows in files):
        names = " ".join(str(rows.file.path) for rows in files)
        raise DataError(
            f"{names}: all documents would be held out for evaluation; give data.eval_path, or more"
            " documents"
        )
    return eval_rows[:most], HeldOut(seed=data.seed, up_to=up_to)


def _smallest_draws(rows: Windows, count: int, data: TextDataConfig) -> dict[int, float]:
    """Draws of held-out documents that fill `count` rows, and the smallest of those looked at."""
    file, missing, held_out = rows.file, count * rows.room, HeldOut(seed=data.seed)
    looked_at = min(file.documents, LOOKED_AT)
    draws: dict[int, float] = {}
    for document in Random(f"{data.seed} evaluation").sample(range(file.documents), looked_at):
        number = held_out.draw(document_hash(file, document))
        if number <= data.eval_fraction or number <= min(draws.values(), default=1.0):
            draws[document] = number
        if number <= data.eval_fraction:
            start, end = file.span(document)
            missing -= end - start
        if missing <= 0:
            break
    file.release()
    return draws
