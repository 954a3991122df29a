"""A piece of rows as dialogues in tokens, with what step 1 learns of them: what a worker does."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.data.examples import Encoded as EncodedDialogue
from pipeline.data.history import histories
from pipeline.data.prompt_hash import content_hash, prompt_hash
from pipeline.data.row_uses import is_usable
from pipeline.data.shapes import read_row
from pipeline.data.sources import Row
from pipeline.data.store.documents import Documents
from pipeline.data.store.encode import BadRow, Encoded, Encoder, Limits, rows_of
from pipeline.data.store.marks import RECORD, USES, Marks, uses_bits
from pipeline.data.turns import Reading
from pipeline.errors import ConfigError, DataError

if TYPE_CHECKING:
    from typing import Literal

    from pipeline.data.chat_format import ChatFormat
    from pipeline.data.examples import Example
    from pipeline.data.store.pieces import Piece

ORIGIN = "the row"
"""What messages call it: its file and line are known to the process that writes."""

REVISES = "supersedes"
"""The column of a rating that takes another one's place, which may lie anywhere before it."""


@dataclass(frozen=True)
class DialogueRecipe:
    """How rows become dialogues in tokens; it goes to the worker processes."""

    chat: "ChatFormat"
    fields: Mapping[str, str]
    history: str
    train_on: "Literal['assistant', 'all']"
    limits: Limits

    def make(self) -> Encoder:
        """What turns pieces into tokens, in the process that calls this."""
        return self.encode

    def encode(self, piece: "Piece") -> Encoded:
        """The dialogues of a piece, one document for each row that is a dialogue or a prompt.

        Raises:
            DataError, ConfigError: its file can't be read, or has ratings that take others back.
        """
        reading = Reading()
        dialogues: list[EncodedDialogue] = []
        records: list[tuple[int, int, int]] = []
        bad: list[tuple[int, str]] = []
        number = 0
        for number, (_, row) in enumerate(rows_of(piece, self.limits), 1):
            if row is None:
                continue
            if isinstance(row, dict) and row.get(REVISES) is not None:
                raise ConfigError(
                    f"{piece.path} has ratings that take earlier ones back, which are read as a"
                    " whole: give the file itself to the step"
                )
            try:
                found = row if isinstance(row, BadRow) else self._document(row, reading)
            except DataError as error:
                found = BadRow(str(error).removeprefix(f"{ORIGIN}: "))
            except UnicodeEncodeError:
                found = BadRow("its text has half a surrogate pair")
            if isinstance(found, BadRow):
                bad.append((number - 1, found.reason))
            elif found is not None:
                records.append(found[0])
                dialogues.append(found[1])
        return Encoded(
            self._joined(dialogues, records), number, tuple(bad), Counter(reading.left_out)
        )

    def _document(
        self, columns: Mapping[str, Any], reading: Reading
    ) -> "tuple[tuple[int, int, int], EncodedDialogue] | None":
        """The record and the tokens of a row; None of one that is left out."""
        example = read_row(Row(columns, ORIGIN), self.fields, reading)
        if example is None:
            return None
        for turn in (*example.prompt, *example.chosen):
            turn.content.encode()  # raises for half a surrogate pair, which no tokenizer takes
        uses = uses_bits([use for use in USES if is_usable(example, use)])
        return (prompt_hash(example), content_hash(example), uses), self._tokens(example)

    def _tokens(self, example: "Example") -> EncodedDialogue:
        """A row without a demonstration, whose prompt alone counts: eos."""
        if not is_usable(example, "demonstrations"):
            return EncodedDialogue.untrained([self.limits.eos])
        (shown,) = histories([example], self.history)
        return self.chat.encode(shown.prompt, shown.chosen, self.train_on)

    def _joined(
        self, dialogues: list[EncodedDialogue], records: list[tuple[int, int, int]]
    ) -> Documents:
        ids = [token for each in dialogues for token in each.input_ids]
        trained = [flag for each in dialogues for flag in each.trained]
        return Documents(
            np.array(ids, f"<u{self.limits.width}"),
            np.array([len(each) for each in dialogues], np.int64),
            Marks(np.array(trained, np.bool_), np.array(records, RECORD)),
        )
