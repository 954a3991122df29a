"""Dialogues of token files as the rows of a step: the same rows, in the same order, as their texts.

`python -m pipeline.data.store pack --rows dialogues` writes such files. Each document's record has
the hashes by which rows are shared out, so nothing but these is read before a step trains.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import NDArray

from pipeline.config import DataConfig, RowColumns, RowUse
from pipeline.data.examples import Encoded
from pipeline.data.prompt_record import PromptRecord
from pipeline.data.row_uses import uses_of
from pipeline.data.sharing import SharedPath, share_out
from pipeline.data.sources import TOKENS, split_weight
from pipeline.data.store.layout import Rendering
from pipeline.data.store.marks import USES, has_use
from pipeline.data.store.pack import rendering_of
from pipeline.data.store.reader import TokenFile
from pipeline.data.store.vocabulary import vocabulary_of
from pipeline.errors import DataError

if TYPE_CHECKING:
    from pipeline.data.chat_format import ChatFormat

logger = logging.getLogger(__name__)

PART = 2**20
"""Records that are read at a time."""


@dataclass(frozen=True)
class PackedDialogue:
    """A document of a token file of dialogues."""

    file: TokenFile
    document: int

    def read(self) -> Encoded:
        """Its tokens, and which are learned.

        Raises:
            DataError: a block that they lie in is damaged.
        """
        start, end = self.file.span(self.document)
        return Encoded(self.file.slice(start, end).tolist(), self.file.trained(start, end).tolist())


class PackedRows(Sequence[PackedDialogue]):
    """Dialogues of several files, in any order: 16 bytes each."""

    def __init__(self, files: Sequence[TokenFile], places: Sequence[tuple[int, int]]) -> None:
        """`places` are the file and the document of each."""
        self.files = files
        self.places: NDArray[np.int64] = np.array(places, np.int64).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> PackedDialogue: ...
    @overload
    def __getitem__(self, index: slice) -> "PackedRows": ...
    def __getitem__(self, index: int | slice) -> "PackedDialogue | PackedRows":
        if isinstance(index, slice):
            return PackedRows(self.files, self.places[index].tolist())
        file, document = self.places[index].tolist()
        return PackedDialogue(self.files[file], document)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each dialogue.

        Raises:
            DataError: a block of the documents' ends is damaged.
        """
        lengths = np.zeros(len(self), np.int64)
        for number, file in enumerate(self.files):
            own = np.flatnonzero(self.places[:, 0] == number)
            ends = np.append(0, file.ends(0, file.documents).astype(np.int64))
            documents = self.places[own, 1]
            lengths[own] = ends[documents + 1] - ends[documents]
        return lengths

    def release(self) -> None:
        """Give pages that were read back to the system, so that memory does not grow."""
        for file in self.files:
            file.release()


@dataclass(frozen=True)
class PackedData:
    """The dialogues of one step."""

    train: PackedRows
    eval: PackedRows

    prompts: PromptRecord
    """What this step and the earlier ones train on and hold out."""

    notes: Sequence[str]
    """What a user may want to know."""

    @property
    def fingerprint(self) -> str:
        """A hash that is the same for the same dialogues in the same order, and for no others."""
        contents = [(file.checksum, file.documents) for file in self.train.files]
        digest = hashlib.sha256(repr(contents).encode())
        digest.update(self.train.places.astype("<i8").tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _Row:
    """A record, as rows are shared out: see `pipeline.data.sharing.SharedRow`."""

    prompt: int
    key: int
    uses: int
    file: int
    document: int

    @property
    def whole_prompt(self) -> object:
        return self.file, self.document

    @property
    def origin(self) -> str:
        return f"document {self.document} of the token file"

    @property
    def has(self) -> str:
        return " and ".join(use for use in USES if has_use(self.uses, use)) or "nothing"

    def is_usable(self, use: RowUse) -> bool:
        return has_use(self.uses, use)


def load_packed(
    config: DataConfig,
    chat: "ChatFormat",
    model: str,
    *,
    earlier: PromptRecord | None = None,
) -> PackedData:
    """The dialogues that step 1 trains on and is evaluated on; the log gets the notes.

    Args:
        config: the token files, and how their rows are shared out.
        chat: the format of the step, with the tokenizer of its model.
        model: where that is, for messages.
        earlier: the prompts of the steps before, which stay apart.

    Raises:
        DataError: a path is not a token file of dialogues, or of another tokenizer or format; or
            the step is left without rows.
    """
    names = [split_weight(spec) for spec in (*config.path, *config.eval_path)]
    files = [_opened(Path(name).expanduser(), config, chat, model) for name, _ in names]
    notes = [
        f"{file.path}: {file.documents:,} packed dialogues and prompts, {file.layout.tokens:,}"
        " tokens"
        for file in files
    ]
    paths = [
        SharedPath(f"{name} (path {number + 1})", weight, list(_rows(file, number)), ())
        for number, (file, (name, weight)) in enumerate(zip(files, names, strict=True))
    ]
    shared = share_out(
        paths[: len(config.path)],
        paths[len(config.path) :],
        config,
        earlier or PromptRecord(),
        uses_of(RowColumns()),
        notes,
        step=1,
    )
    for note in notes:
        logger.info("data for step 1: %s", note)
    train, held_out = (
        PackedRows(files, [(row.file, row.document) for row in rows])
        for rows in (shared.train, shared.eval)
    )
    return PackedData(train, held_out, shared.prompts, notes)


def _rows(file: TokenFile, number: int) -> Iterator[_Row]:
    for start in range(0, file.documents, PART):
        records = file.records(start, min(start + PART, file.documents))
        for document, (prompt, key, uses) in enumerate(records.tolist(), start):
            yield _Row(prompt, key, uses, number, document)


def _opened(path: Path, config: DataConfig, chat: "ChatFormat", model: str) -> TokenFile:
    if path.suffix != TOKENS:
        raise DataError(
            f"data path {path} is not a token file, and others are: give either rows or token"
            " files, as data.path and as data.eval_path"
        )
    file = TokenFile(path)
    rendering = file.origin.rendering
    if rendering is None:
        raise DataError(
            f"data path {path} holds texts, on which step 0 trains; step 1 reads dialogues, which"
            " `python -m pipeline.data.store pack --rows dialogues` packs with what is learned"
        )
    wanted = rendering_of(chat, train_on=config.train_on, history=config.history)
    is_other = file.origin.tokenizer_hash != vocabulary_of(chat.tokenizer, model).hash
    # Another format may have other tokens of its own: then it is the format that is named.
    if is_other and (rendering.format == wanted.format or rendering.template == wanted.template):
        raise DataError(
            f"data path {path} was packed with the tokenizer {file.origin.tokenizer}, and {model}"
            f" has another; pack the rows again with --tokenizer {model}"
        )
    _check_rendering(path, rendering, wanted)
    return file


def _check_rendering(path: Path, rendering: Rendering, wanted: Rendering) -> None:
    if rendering.template != wanted.template:
        raise DataError(
            f"data path {path} was packed in the chat format {rendering.format}, and this step has"
            f" {wanted.format}, whose template differs; set data.format, data.template_args and"
            " data.template_date as the file has them, or pack the rows again with those of this"
            " step"
        )
    for name in ("train_on", "history"):
        there, here = getattr(rendering, name), getattr(wanted, name)
        if there != here:
            raise DataError(
                f"data path {path} was packed with {name} {there}, and data.{name} is {here}; set"
                f" it to {there}, or pack the rows again with --{name.replace('_', '-')} {here}"
            )
