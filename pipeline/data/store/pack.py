"""Tokenize a corpus: split it into pieces, tokenize them in worker processes, and join them.

Each finished piece is a file in X.pieces, so that `--resume` tokenizes only the missing ones. The
result is bitwise identical for any number of workers.
"""

import gzip
import json
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
import zlib
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache, partial
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import numpy as np

from pipeline.data.store.token_file import (
    Origin,
    TokenFile,
    TokenWriter,
    Vocabulary,
    part_path,
    token_dtype,
)
from pipeline.files.lock import RunLock
from pipeline.system.errors import ConfigError, DataError
from pipeline.system.logs import Progress

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".jsonl.gz", ".txt")
PIECE_BYTES = 16 * 2**20
BATCH_BYTES = 256 * 2**10
"""Bytes of text passed to the tokenizer at a time; its result takes about 300 bytes per token."""

MAX_LOGGED_BAD_ROWS = 100
"""Maximum number of bad rows that are logged; others are only counted."""


@dataclass(frozen=True)
class Piece:
    """Lines of a .jsonl file that start between two offsets, or a whole file of another type."""

    source: Path
    start: int
    end: int
    target: Path
    """File for the tokens."""


def find_sources(patterns: Sequence[str]) -> list[Path]:
    """Return the files that match paths and patterns (`*`, `**`), sorted within each pattern.

    Raises:
        DataError: a pattern matches nothing, a directory, or an unsupported file.
    """
    sources: dict[Path, None] = {}
    for pattern in patterns:
        names = [pattern] if Path(pattern).exists() else sorted(glob(pattern, recursive=True))  # noqa: PTH207
        if not names or not all(name.endswith(SUFFIXES) and Path(name).is_file() for name in names):
            raise DataError(
                f"{pattern} can't be packed; pass {', '.join(SUFFIXES)} files, as in"
                " 'directory/*.jsonl'"
            )
        sources |= dict.fromkeys(map(Path, names))
    return list(sources)


def pack(
    sources: Sequence[Path],
    vocabulary: Vocabulary,
    out: Path,
    *,
    field: str = "text",
    workers: int = 1,
    skip_bad_rows: bool = False,
    resume: bool = False,
) -> TokenFile:
    """Write the token file `out` from the texts of the source files.

    Raises:
        ConfigError: the file exists, or is unfinished and not resumed with the same settings.
        DataError: a row is bad (without `skip_bad_rows`), a file changed, or there is no text.
    """
    start = time.perf_counter()
    if part_path(out, "idx").exists():
        raise ConfigError(f"{out} already exists; choose another file, or remove it")
    with RunLock(out.with_name(f"{out.name}.lock")):
        directory = out.with_name(f"{out.name}.pieces")
        plan = _make_plan(sources, vocabulary, field)
        _start_or_resume(directory, plan, resume=resume)
        pieces = list(_split_into_pieces(sources, directory))
        progress = Progress("pack", len(pieces))
        progress.start()
        num_bad_rows = lines_before = 0
        try:
            summaries = _encode_pieces(pieces, vocabulary, field, workers)
            for number, (piece, (num_lines, bad)) in enumerate(zip(pieces, summaries, strict=True)):
                lines_before = lines_before if piece.start else 0
                for line, reason in bad:
                    num_bad_rows += 1
                    bad_row = f"{piece.source}:{lines_before + line}: {reason}"
                    _skip_or_raise(bad_row, num_bad_rows, skip_bad_rows)
                lines_before += num_lines
                progress.update(number + 1, {}, seconds=time.perf_counter() - start)
        finally:
            progress.stop()
        if _make_plan(sources, vocabulary, field) != plan:
            raise DataError(f"a source of {out} changed while it was packed; pack it again")
        file = _join(pieces, vocabulary, out, num_bad_rows)
        shutil.rmtree(directory)
    return file


def _skip_or_raise(bad_row: str, count: int, skip: bool) -> None:  # noqa: FBT001
    if not skip:
        raise DataError(
            f"{bad_row}; fix the row, or skip such rows with --on-bad-row skip --resume"
        )
    if count <= MAX_LOGGED_BAD_ROWS:
        logger.warning("skipped %s", bad_row)


def _make_plan(sources: Sequence[Path], vocabulary: Vocabulary, field: str) -> str:
    """Return all inputs that determine the tokens, as JSON."""
    files = [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in sources]
    plan = {"piece": PIECE_BYTES, "tokenizer": vocabulary.hash, "field": field, "files": files}
    return json.dumps(plan)


def _start_or_resume(directory: Path, plan: str, *, resume: bool) -> None:
    path = directory / "plan.json"
    if path.exists():
        if not resume:
            raise ConfigError(f"{directory} is from an unfinished run; add --resume, or remove it")
        if path.read_text() != plan:
            raise ConfigError(
                f"{directory} was created with different source files, tokenizer or field; remove"
                " it to start over"
            )
        return
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(plan)


def _split_into_pieces(sources: Sequence[Path], directory: Path) -> Iterator[Piece]:
    """Split the files into pieces, in order; .gz and .txt files are one piece each."""
    number = 0
    for source in sources:
        size = source.stat().st_size
        step = PIECE_BYTES if source.suffix == ".jsonl" else max(1, size)
        for start in range(0, max(1, size), step):
            target = directory / f"{number:08}.npz"
            yield Piece(source, start, min(start + step, size), target)
            number += 1


def _join(pieces: Sequence[Piece], vocabulary: Vocabulary, out: Path, bad_rows: int) -> TokenFile:
    num_documents = 0
    with TokenWriter(out, token_dtype(vocabulary.size)) as writer:
        for piece in pieces:
            with np.load(piece.target) as content:
                writer.append(content["ids"], content["lengths"])
                num_documents += len(content["lengths"])
        if not num_documents:
            raise DataError(f"no file has a row with text (first file: {pieces[0].source})")
        return writer.finish(Origin(vocabulary.name, vocabulary.hash, bad_rows))


Summary = tuple[int, list[tuple[int, str]]]
"""Number of lines in a piece, and (line counted from 1, reason) for each bad row."""


def _encode_pieces(
    pieces: Sequence[Piece], vocabulary: Vocabulary, field: str, workers: int
) -> Iterator[Summary]:
    """Tokenize the pieces that have no file yet, and yield the summaries of all pieces in order."""
    work = partial(_encode_piece, vocabulary=vocabulary, field=field)
    if workers == 1:
        yield from map(work, pieces)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _init_worker)
    try:
        yield from pool.map(work, pieces)
    except BrokenProcessPool as error:
        raise DataError(
            "a worker was killed, probably for lack of memory; continue with --resume and fewer"
            " --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _init_worker() -> None:
    os.environ["RAYON_NUM_THREADS"] = "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@lru_cache(maxsize=1)
def _load_tokenizer(definition: str) -> "Tokenizer":
    """Return a tokenizer that treats special tokens in a text as ordinary text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _encode_piece(piece: Piece, vocabulary: Vocabulary, field: str) -> Summary:
    """Write a piece's file, with eos after each document, unless it exists; return its summary."""
    if piece.target.exists():
        with np.load(piece.target) as content:
            return json.loads(str(content["summary"]))
    ids, lengths = array("I"), array("q")
    bad: list[tuple[int, str]] = []
    texts: list[str] = []
    num_bytes = line = 0

    def flush() -> None:
        tokenizer = _load_tokenizer(vocabulary.definition)
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            lengths.append(len(encoding.ids) + 1)
            ids.fromlist(encoding.ids)
            ids.append(vocabulary.eos)
        texts.clear()

    for line, content in enumerate(_read_lines(piece), 1):
        try:
            text = _parse_text(content, piece, field)
        except (ValueError, RecursionError) as error:
            bad.append((line, str(error)))
            continue
        if text is not None:
            texts.append(text)
            num_bytes += len(content)
        if num_bytes >= BATCH_BYTES:
            flush()
            num_bytes = 0
    flush()
    tokens = np.frombuffer(ids, np.uint32).astype(token_dtype(vocabulary.size))
    temporary = piece.target.with_suffix(".writing")
    with temporary.open("wb") as file:
        summary = json.dumps((line, bad))
        np.savez(file, ids=tokens, lengths=np.frombuffer(lengths, np.int64), summary=summary)
        os.fsync(file.fileno())
    temporary.rename(piece.target)
    return line, bad


def _read_lines(piece: Piece) -> Iterator[bytes]:
    """Yield the lines of a piece; a .txt file counts as one line."""
    try:
        if piece.source.suffix == ".txt":
            yield piece.source.read_bytes()
        elif piece.source.suffix == ".gz":
            with gzip.open(piece.source) as unzipped:
                yield from cast("BinaryIO", unzipped)
        else:
            with piece.source.open("rb") as file:
                file.seek(max(0, piece.start - 1))
                if piece.start:
                    file.readline()
                while file.tell() < piece.end:
                    yield file.readline()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{piece.source} can't be read ({error}); replace it") from error


def _parse_text(line: bytes, piece: Piece, field: str) -> str | None:
    """Return the text of a line, or None if it is empty. Raise ValueError for a bad row."""
    if line.startswith(b"\xef\xbb\xbf") and piece.start == 0:
        line = line[3:]
    if not line.strip():
        return None
    text = line.decode()
    if piece.source.suffix == ".txt":
        return text
    row = json.loads(text)
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        raise ValueError(f"the row has no text in the field {field!r}")  # noqa: TRY004
    row[field].encode()  # raises for lone surrogates
    return row[field]
