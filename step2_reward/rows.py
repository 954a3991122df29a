"""Rows of step 2 as token ids, and their micro-batches.

Dimension names: B rows, K sequences of a row, S sequences of a batch, T targets, O outputs.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pipeline.data.batches import TokenBatch, collate
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Example, Message
from pipeline.data.rows.columns import Turns
from pipeline.models.forward.scores import step_ends
from pipeline.parallel.device import local_device, to_device
from pipeline.run.training import shard_rows
from pipeline.system.errors import DataError
from step2_reward.config import RewardConfig
from step2_reward.labels import SINGLE_KINDS, Labels

UNLIMITED = 2**31
"""A token limit that exceeds the length of any dialogue."""


@dataclass(frozen=True)
class Row:
    """Token ids of a row's dialogues, and its labels."""

    sequences: tuple[Encoded, ...]

    targets: tuple[float, ...] = ()
    """The targets: a class index, the standardized label, or the margin of a pair; for steps, the
    correctness of each labeled step, from 0 to 1."""

    ends: tuple[int, ...] | None = None
    """Positions in the sequence at which labeled steps end; None for other kinds of label."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all sequences."""
        return sum(map(len, self.sequences))


@dataclass(frozen=True)
class Batch:
    """B rows; the sequences of a row are adjacent, so that a pair shares its prompt."""

    tokens: TokenBatch
    """Tokens; a process without rows (B = 0) holds the tokens of a spare row, so that it runs the
    same passes."""

    sequence_indices: Int[Tensor, "B K"]
    """Index in `positions` of each sequence of a row, unless rows have labeled steps."""

    targets: Float[Tensor, " T"]

    positions: Int[Tensor, " O"]
    """Tokens whose outputs are used: the last of each sequence, or the ends of labeled steps."""

    weight: float
    """Weight of each labeled step, such that the weights of all steps sum to the number of rows."""

    indices: tuple[int, ...]
    """The index of each row in the global batch."""

    @property
    def classes(self) -> Int[Tensor, " T"]:
        """The targets as indices of classes."""
        return self.targets.long()

    def group_by_row(self, scores: Float[Tensor, " S"]) -> Float[Tensor, "B K"]:
        """Return the scores of each row's sequences."""
        return scores[self.sequence_indices]


def encode_dialogue(
    chat: ChatFormat, example: Example, response: Turns, *, max_length: int
) -> Encoded:
    """Encode the prompt and the response, or the prompt alone if the response is empty.

    Long dialogues lose their beginning, since the score is read at the end; for encoders
    the first token is kept.
    """
    if response:
        full = chat.encode(example.prompt, response, origin=example.origin)
    else:
        full = Encoded.untrained(chat.encode_prompt(example.prompt, origin=example.origin))
    return full.tail(max_length, keep_first=chat.begins_with_cls)


def encode_rows(
    examples: Sequence[Example], labels: Labels, chat: ChatFormat, *, max_length: int
) -> list[Row]:
    """Convert rows of any kind except steps to token ids and targets."""

    def encode(example: Example) -> Row:
        encoded = [
            encode_dialogue(chat, example, response, max_length=max_length)
            for response in get_responses(example, labels)
        ]
        return Row(tuple(encoded), (get_target(example, labels),))

    return [encode(example) for example in examples]


def get_responses(example: Example, labels: Labels) -> list[Turns]:
    """Return the responses of a row to train on, the better one first."""
    return [example.chosen] if labels.kind in SINGLE_KINDS else [example.chosen, example.rejected]


def get_target(example: Example, labels: Labels) -> float:
    """Return the target: a class index, the standardized label, or the margin of a pair."""
    if labels.kind == "classes":
        return float(labels.class_index(example))
    if labels.kind == "scalar":
        assert isinstance(example.label, int | float)  # checked by `resolve_labels`
        return (example.label - labels.mean) / labels.std
    return example.margin or 0.0


def split_steps(example: Example, separator: str) -> list[str]:
    """Return the text of each step, in which separators are replaced by spaces."""
    parts = [map(str.strip, text.split(separator)) for text in example.steps]
    return [" ".join(filter(None, words)) for words in parts]


def encode_steps(
    example: Example,
    chat: ChatFormat,
    separator: str,
    separators: Collection[int],
    *,
    max_length: int = UNLIMITED,
) -> Row:
    """Encode a dialogue whose steps are joined by the separator; truncate its beginning.

    Args:
        example: a row of steps.
        chat: the chat format of the model.
        separator: the text between steps.
        separators: the tokens that end a step.
        max_length: maximum number of tokens, the last of which are kept.

    Raises:
        DataError: tokenization changes the number of steps.
    """
    texts = split_steps(example, separator)
    full = chat.encode(
        example.prompt, (Message("assistant", separator.join(texts)),), origin=example.origin
    )
    (ends,) = step_ends(collate([full]), separators)
    if len(ends) != len(texts):
        raise DataError(
            f"{example.origin}: {len(texts)} steps joined by {separator!r} become {len(ends)} when"
            " tokenized; choose another reward.step_separator"
        )
    dropped = max(0, len(full) - max_length)
    labeled = [
        (end - dropped, label)
        for end, label in zip(ends, example.step_labels, strict=True)
        if label is not None and end >= dropped
    ]
    return Row(
        (full.tail(max_length),),
        targets=tuple(label for _, label in labeled),
        ends=tuple(end for end, _ in labeled),
    )


def split_rows(rows: Sequence[Row], config: RewardConfig) -> list[Batch]:
    """Split the rows into micro-batches, and return those of this process."""
    max_sequences = max(len(row.sequences) for row in rows)
    parts = shard_rows(
        [row.num_tokens for row in rows], config, config.model, sequences=max_sequences
    )
    weight = len(rows) / max(1, sum(len(row.ends or ()) for row in rows))
    return [collate_rows(rows, part, weight=weight) for part in parts]


def collate_rows(all_rows: Sequence[Row], indices: Sequence[int], *, weight: float = 1.0) -> Batch:
    """Collate the rows with these indices; if there are none, use the first row as a spare."""
    rows = [all_rows[index] for index in indices]
    present = rows or all_rows[:1]
    tokens = collate([sequence for row in present for sequence in row.sequences])
    max_sequences = max(len(row.sequences) for row in present)
    sequence_indices = torch.zeros(len(rows), max_sequences, dtype=torch.int64)
    positions, first = tokens.last_tokens, 0
    for index, row in enumerate(rows):
        sequence_indices[index, : len(row.sequences)] = torch.arange(len(row.sequences)) + first
        first += len(row.sequences)
    if all_rows[0].ends is not None:
        # Relative to the last token, because the beginning may be a shared prompt.
        starts = [
            last + 1 - len(row.sequences[0])
            for last, row in zip(positions.tolist(), present, strict=True)
        ]
        ends = [starts[i] + end for i, row in enumerate(rows) for end in row.ends or ()]
        positions = torch.tensor(ends, dtype=torch.int64)
    targets = torch.tensor([target for row in rows for target in row.targets], dtype=torch.float32)
    return Batch(
        tokens=tokens.to(local_device()),
        sequence_indices=to_device(sequence_indices),
        targets=to_device(targets),
        positions=to_device(positions),
        weight=weight,
        indices=tuple(indices),
    )
