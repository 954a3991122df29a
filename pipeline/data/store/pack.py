"""JSON lines to a token file: the same bytes for any number of workers, killed or not."""

import hashlib
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.data.store.config import PackConfig
from pipeline.data.store.encode import Encoded, Limits, Recipe, TextRecipe
from pipeline.data.store.journal import START, Entry, Journal, crc_of, resume_from
from pipeline.data.store.layout import VERSION, Layout, Origin, Rendering, token_width
from pipeline.data.store.pieces import PIECE_BYTES, Piece, cut
from pipeline.data.store.sources import SourceFile, check_unchanged, sources_hash
from pipeline.data.store.vocabulary import Vocabulary
from pipeline.data.store.workers import encode_all
from pipeline.data.store.writer import TokenWriter, ends_path, writing_path
from pipeline.errors import ConfigError, DataError
from pipeline.progress import Progress

if TYPE_CHECKING:
    from pipeline.data.chat_format import ChatFormat

logger = logging.getLogger(__name__)

NAMED_BAD_ROWS = 100
"""Bad rows that are named; the others are only counted."""


@dataclass(frozen=True)
class Packed:
    """What a pack has written."""

    layout: Layout
    bad_rows: int
    seconds: float


def pack(
    sources: Sequence[SourceFile],
    vocabulary: Vocabulary,
    config: PackConfig,
    chat: "ChatFormat | None" = None,
) -> Packed:
    """Write the token file `config.out` from the rows of the source files.

    Args:
        sources: the files.
        vocabulary: of the tokenizer.
        config: how they are read.
        chat: the format of dialogues; None of texts.

    Raises:
        ConfigError: the file is there, or half-written and `resume` is false or of other settings.
        DataError: a bad row with `on_bad_row` stop, a file that can't be read or changed meanwhile,
            no document at all.
    """
    began = time.perf_counter()
    resume = is_resumed(config.target, resume=config.resume)
    rendering = None
    if chat is not None:
        rendering = rendering_of(chat, train_on=config.train_on, history=config.history)
    plan, path = _plan(sources, vocabulary, config, rendering), journal_path(config.target)
    limits = Limits(config.max_row, vocabulary.eos, token_width(vocabulary.size))
    recipe = _recipe(vocabulary, config, chat, limits)
    marked = chat is not None
    with TokenWriter(config.target, limits.width, marked=marked, resume=resume) as writer:
        done, entry = resume_from(path, plan, writer) if resume else (0, START)
        pieces = cut([source.path for source in sources], config.max_row, skip=done)
        with Journal(path, plan, resume=resume) as journal:
            work = _Work(sources, config, writer, journal, entry)
            shown = _Shown(sources, done, writer.tokens)
            results = encode_all(recipe, pieces, config.workers)
            with closing(results):
                try:
                    for piece, encoded in results:
                        work.add(piece, encoded)
                        shown.update(piece, writer.tokens)
                finally:
                    shown.stop()
        check_unchanged(sources)
        if not writer.documents:
            has = "a text" if chat is None else "a dialogue or a prompt"
            raise DataError(f"no row of {sources[0].path} or any other file has {has}")
        layout = writer.finish(_origin(sources, vocabulary, config, work.entry, rendering))
    path.unlink()
    work.log_left_out()
    return Packed(layout, work.entry.bad_rows, time.perf_counter() - began)


def journal_path(path: Path) -> Path:
    """Where the journal of a half-written token file is."""
    return path.with_name(path.name + ".journal")


def is_resumed(path: Path, *, resume: bool) -> bool:
    """Whether there is a half-written token file to go on with.

    Raises:
        ConfigError: there is a whole one, or a half-written one and `resume` is false.
    """
    if path.exists():
        raise ConfigError(f"{path} already exists; name another file, or remove it")
    half, journal = writing_path(path), journal_path(path)
    is_begun = half.exists() and ends_path(path).exists() and journal.exists()
    if not is_begun or not journal.stat().st_size:  # ended before there was anything to keep
        return False
    if not resume:
        raise ConfigError(f"{half} is half-written; --resume continues it, or remove it")
    return True


class _Work:
    """The one writer: pieces come in order, and each is in the journal once it is written."""

    def __init__(
        self,
        sources: Sequence[SourceFile],
        config: PackConfig,
        writer: TokenWriter,
        journal: Journal,
        entry: Entry,
    ) -> None:
        self.sources, self.config = sources, config
        self.writer, self.journal, self.entry = writer, journal, entry
        self.left_out = Counter[str]()

    def add(self, piece: Piece, encoded: Encoded) -> None:
        """Append a piece.

        Raises:
            DataError: it has a bad row, and `on_bad_row` is stop.
        """
        before = self.entry
        for number, (line, reason) in enumerate(encoded.bad, before.bad_rows + 1):
            self._meet(f"{piece.path}:{before.lines + line + 1}: {reason}", number)
        documents = encoded.documents
        written = self.writer.append(documents.ids, documents.lengths, documents.marks)
        self.writer.flush()
        self.entry = Entry(
            tokens=self.writer.tokens,
            documents=self.writer.documents,
            crc=crc_of(written, before.crc),
            lines=0 if piece.is_last else before.lines + encoded.lines,
            bad_rows=before.bad_rows + len(encoded.bad),
            left_out=before.left_out + encoded.left_out.total(),
        )
        self.journal.add(self.entry)
        self.left_out += encoded.left_out

    def log_left_out(self) -> None:
        """Say why rows are no documents; of a pack that was resumed those since then."""
        for reason, count in self.left_out.most_common():
            logger.info("left out %s %s", f"{count:,} row{'s' * (count != 1)}", reason)

    def _meet(self, sentence: str, number: int) -> None:
        if self.config.on_bad_row == "stop":
            raise DataError(
                f"{sentence}; repair the row, or let `python -m pipeline.data.store pack` leave out"
                " such rows, with --on-bad-row skip, and with --resume where it was ended"
            )
        if number <= NAMED_BAD_ROWS:
            logger.warning("left out %s", sentence)
        if number == NAMED_BAD_ROWS:
            logger.warning("more rows that are left out are only counted")


class _Shown:
    """How far the pack is, in MiB of the source files."""

    def __init__(self, sources: Sequence[SourceFile], done: int, tokens: int) -> None:
        """`done` pieces and their `tokens` are there: of a `.gz` their share is a guess."""
        self._sources, self._tokens_before = sources, tokens
        total = sum(source.bytes for source in sources)
        self._bytes = min(done * PIECE_BYTES, total)
        self._step = self._step_before = self._bytes // 2**20
        self._began = time.perf_counter()
        self._progress = Progress("pack, MiB:", max(1, math.ceil(total / 2**20)))
        self._progress.start()

    def update(self, piece: Piece, tokens: int) -> None:
        """A piece is done, and there are `tokens` in all."""
        size = self._sources[piece.file].bytes if piece.is_last else 0
        self._bytes += piece.end - piece.begin if piece.lines is None else size
        step = min(math.ceil(self._bytes / 2**20), self._progress.total_steps)
        if step <= self._step:
            return
        self._step = step
        seconds = time.perf_counter() - self._began
        speed = (tokens - self._tokens_before) / max(seconds, 1e-9)
        whole = seconds * step / (step - self._step_before)  # as if this run had begun at 0
        self._progress.update(step, {"tokens_per_second": speed}, seconds=whole)

    def stop(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()


def rendering_of(chat: "ChatFormat", *, train_on: str, history: str) -> Rendering:
    """How dialogues become tokens with these settings; how many are left out is not known yet."""
    template = hashlib.sha256(chat.template.encode()).hexdigest()
    return Rendering(chat.name, template, train_on, history)


def _recipe(
    vocabulary: Vocabulary, config: PackConfig, chat: "ChatFormat | None", limits: Limits
) -> Recipe:
    if chat is None:
        return TextRecipe(vocabulary.definition, config.field, limits)
    from pipeline.data.store.dialogues import DialogueRecipe

    fresh = replace(chat)  # without the encoders that it has made, which don't go to processes
    return DialogueRecipe(fresh, config.fields, config.history, config.train_on, limits)


def _origin(
    sources: Sequence[SourceFile],
    vocabulary: Vocabulary,
    config: PackConfig,
    entry: Entry,
    rendering: Rendering | None,
) -> Origin:
    return Origin(
        tokenizer=vocabulary.name,
        tokenizer_hash=vocabulary.hash,
        vocabulary=vocabulary.size,
        eos=vocabulary.eos,
        field=config.field if rendering is None else "",
        files=len(sources),
        bytes=sum(source.bytes for source in sources),
        sources=sources_hash(sources),
        names=tuple(source.path.name for source in sources),
        bad_rows=entry.bad_rows,
        rendering=rendering and replace(rendering, left_out=entry.left_out),
    )


def _plan(
    sources: Sequence[SourceFile],
    vocabulary: Vocabulary,
    config: PackConfig,
    rendering: Rendering | None,
) -> str:
    """All that decides the bytes, in one line."""
    files = [{**asdict(source), "path": str(source.path)} for source in sources]
    plan = {
        "version": VERSION,
        "piece": PIECE_BYTES,
        "tokenizer": vocabulary.hash,
        "field": config.field,
        "max_row": config.max_row,
        "files": files,
    }
    if rendering is not None:
        plan["rendering"] = {**asdict(rendering), "fields": config.fields}
    return json.dumps(plan, sort_keys=True)
