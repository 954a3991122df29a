"""Responses as token ids: truncation, skipped rows, and micro-batches.

These include prompts with another row's response, from which KTO estimates the KL.

Dimension names: S sequences of a batch, K response tokens (its targets).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.data.batches import TokenBatch, collate
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Example, Message
from pipeline.parallel.device import local_device, to_device
from pipeline.run.training import shard_rows
from step3_preference.config import PreferenceConfig

RowOutcome = Literal["complete", "truncated", "too long", "equal", "untrained"]
"""Outcome of a row; rows with the last three are skipped."""


@dataclass(frozen=True)
class Row:
    """The prompt with each of a row's responses; one is None if there is a single response."""

    chosen: Encoded | None
    rejected: Encoded | None

    @property
    def sequences(self) -> list[Encoded]:
        """The existing sequences, the chosen one first."""
        return [sequence for sequence in (self.chosen, self.rejected) if sequence is not None]

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all sequences."""
        return sum(map(len, self.sequences))


@dataclass(frozen=True)
class RowBatch:
    """Rows as concatenated sequences; those of a pair are adjacent and share their prompt.

    Results are ordered with the chosen sequences first.
    """

    tokens: TokenBatch
    """Tokens; without rows, those of a spare row, so that all processes run the same passes."""

    counts: tuple[int, ...]
    """Number of response tokens in each sequence of `tokens`; empty if there are no rows."""

    order: tuple[int, ...]
    """Index of each result's sequence in `counts`."""

    chosen: tuple[int, ...]
    """Index in the global batch of each chosen sequence's row."""

    rejected: tuple[int, ...]

    def sums(self, logprobs: Float[Tensor, " K"]) -> Float[Tensor, " S"]:
        """Sum the tokens' log-probabilities over each response."""
        parts = logprobs[: sum(self.counts)].split(list(self.counts))
        # Without rows, an empty slice preserves the autograd graph of the passes.
        return torch.stack([parts[i].sum() for i in self.order]) if parts else logprobs[:0]

    def lengths(self) -> Float[Tensor, " S"]:
        """Return the number of tokens in each response."""
        counts = [self.counts[index] for index in self.order]
        return to_device(torch.tensor(counts, dtype=torch.float32))


@dataclass(frozen=True)
class BatchWithReference:
    """Rows with their reference log-probabilities."""

    rows: RowBatch

    reference: Float[Tensor, " S"] | None
    """The log-probability of each response; None on stages that don't need it."""

    @property
    def tokens(self) -> TokenBatch:
        """The tokens of the rows."""
        return self.rows.tokens


def truncate_row(
    example: Example, chat: ChatFormat, config: PreferenceConfig
) -> tuple[Row, RowOutcome]:
    """Truncate a row to `data.max_length`; return the row and the outcome.

    Both responses stay complete, and their prompt is truncated at its beginning, by the same number
    of tokens. Otherwise, the model would learn differences that only truncation causes.
    """
    start = _prompt_length(example, chat)
    sides = [
        _encode_response(example, response, chat, start) if response else None
        for response in (example.chosen, example.rejected)
    ]
    present = [side for side in sides if side is not None]
    longest = max(map(len, present))
    row = Row(*sides)
    if len(present) == 2 and present[0].input_ids == present[1].input_ids:
        return row, "equal"
    if not all(side.num_targets for side in present):
        return row, "untrained"
    if longest <= config.data.max_length:
        return row, "complete"
    excess = longest - config.data.max_length
    # At least one prompt token must precede the response.
    if config.too_long == "drop" or excess >= response_start(present[0]):
        return row, "too long"
    return Row(*(side and _drop_first(side, excess) for side in sides)), "truncated"


def _prompt_length(example: Example, chat: ChatFormat) -> int:
    """Return the number of tokens before the response, or 0 if none of them can be trained on."""
    if all(turn.role != "assistant" for turn in example.prompt):
        return 0
    return len(chat.encode_prompt(example.prompt, origin=example.origin))


def _encode_response(
    example: Example, response: Sequence[Message], chat: ChatFormat, start: int
) -> Encoded:
    """Encode the dialogue; tokens before index `start` are not trained on."""
    encoded = chat.encode(example.prompt, response, origin=example.origin)
    trained = [flag and index >= start for index, flag in enumerate(encoded.trained)]
    return replace(encoded, trained=trained)


def response_start(side: Encoded) -> int:
    """Return the offset of the response in a sequence."""
    return side.trained.index(True)


def _drop_first(encoded: Encoded, count: int) -> Encoded:
    return Encoded(encoded.input_ids[count:], encoded.trained[count:])


def split_rows(rows: Sequence[Row], config: PreferenceConfig) -> list[RowBatch]:
    """Split the rows, and return this process's micro-batches."""
    parts = shard_rows(
        [row.num_tokens for row in rows],
        config,
        config.model,
        sequences=1 if config.is_unpaired else 2,
    )
    return [collate_rows(rows, part) for part in parts]


def collate_rows(rows: Sequence[Row], indices: Sequence[int]) -> RowBatch:
    """Collate the rows with these indices; if there are none, use the first row as a spare."""
    sides = [(index, side) for index in indices for side in rows[index].sequences]
    is_chosen = [side is rows[index].chosen for index, side in sides]
    order = sorted(range(len(sides)), key=lambda side: not is_chosen[side])
    sequences = [side for _, side in sides]
    num_chosen = sum(is_chosen)
    sorted_rows = [sides[side][0] for side in order]
    return RowBatch(
        tokens=collate(sequences or rows[0].sequences[:1]).to(local_device()),
        counts=tuple(side.num_targets for side in sequences),
        order=tuple(order),
        chosen=tuple(sorted_rows[:num_chosen]),
        rejected=tuple(sorted_rows[num_chosen:]),
    )


def mismatched_batches(rows: Sequence[Row], config: PreferenceConfig) -> list[RowBatch]:
    """Pair each row's prompt with a mismatched response; return this process's micro-batches."""
    return split_rows(
        [Row(sequence, None) for sequence in mismatch_responses(rows, config.data.max_length)],
        config,
    )


def mismatch_responses(rows: Sequence[Row], max_length: int) -> list[Encoded]:
    """Pair each row's prompt with the response of the next row with a different prompt.

    The order of the rows is that of the whole step: an offset within micro-batches would make the
    estimate depend on them, and a reversal would leave the middle row with its own response. If all
    rows have the same prompt, each keeps its own response. Sequences that are too long lose the
    beginning of the prompt.
    """
    sides = [row.sequences[0] for row in rows]
    starts = [response_start(side) for side in sides]
    prompts = [side.input_ids[:start] for side, start in zip(sides, starts, strict=True)]
    mismatched: list[Encoded] = []
    for row, prompt in enumerate(prompts):
        others = ((row + offset) % len(rows) for offset in range(1, len(rows)))
        other = next((index for index in others if prompts[index] != prompt), row)
        response, response_offset = sides[other], starts[other]
        mismatched.append(
            Encoded(
                prompt + response.input_ids[response_offset:],
                [False] * len(prompt) + response.trained[response_offset:],
            ).tail(max_length)
        )
    return mismatched
