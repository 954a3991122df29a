"""Labelled rows of step 2: kinds of labels, what each needs, and their tokens."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pipeline import offline
from pipeline.data.batches import EncodedPair, PairBatch, TokenBatch, collate
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Example
from pipeline.data.lengths import Fit, RowsFit
from pipeline.data.rows.dialogues import Turns
from pipeline.parallel.device import local_device, send
from step2_reward.config import RewardConfig
from step2_reward.label_rows import OF_CLASSES, OF_LABELS, Labels

logger = logging.getLogger(__name__)


def encode(
    examples: Sequence[Example], chat: ChatFormat, config: RewardConfig
) -> list[EncodedPair]:
    """Token ids of both dialogues.

    What is longer than `max_length` loses its beginning: the score is read at the end.
    """
    limit = config.data.max_length
    keep = chat.begins_with_cls
    return [
        EncodedPair(
            chosen=chat.encode(example.prompt, example.chosen).tail(limit, keep_first=keep),
            rejected=chat.encode(example.prompt, example.rejected).tail(limit, keep_first=keep),
            margin=example.margin or 0.0,
        )
        for example in examples
    ]


def pairs_fit(chat: ChatFormat, config: RewardConfig) -> RowsFit[Example]:
    """Whether the responses of a pair still differ where it is cut."""
    limit = config.data.max_length

    def fit(examples: Sequence[Example]) -> list[Fit]:
        fits = []
        for each in examples:
            chosen = chat.encode(each.prompt, each.chosen)
            rejected = chat.encode(each.prompt, each.rejected)
            differ = chosen.tail(limit).input_ids != rejected.tail(limit).input_ids
            fits.append(Fit(max(len(chosen), len(rejected)) > limit, int(differ)))
        return fits

    return RowsFit(fit, end="beginning", empty="have equal responses", rows="pairs")


def cut(pairs: Sequence[EncodedPair], config: RewardConfig) -> list[PairBatch]:
    """This process's micro-batches of the pairs."""
    deterministic = config.model.zero.reduction == "deterministic"
    return offline.pair_batches(pairs, config, deterministic=deterministic)


@dataclass(frozen=True)
class LabelledRow:
    """Token ids of a row's dialogues, and what is known of them."""

    sequences: tuple[Encoded, ...]

    target: float = 0.0
    """The number of the class, or the number to be learned, shifted and scaled; 1 for a tie."""

    ranks: tuple[float, ...] = ()
    """The rank of each sequence, 1 for the best; empty unless the row is a ranked list."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(map(len, self.sequences))


@dataclass(frozen=True)
class LabelledBatch:
    """B rows; the first sequences of all rows come first, then the second ones."""

    tokens: TokenBatch
    """The sequences of one row more where B is 0: a process without rows runs the same passes."""

    places: Int[Tensor, "B K"]
    """Where in the batch each sequence of a row lies; 0 where it has fewer."""

    ranks: Float[Tensor, "B K"]
    """The rank of each sequence, 1 for the best; infinite where a row has fewer."""

    targets: Float[Tensor, " B"]

    numbers: tuple[int, ...]
    """The place of each row among those that were cut."""

    @property
    def classes(self) -> Int[Tensor, " B"]:
        """The targets, as numbers of classes."""
        return self.targets.long()

    def by_row(self, scores: Float[Tensor, " S"]) -> Float[Tensor, "B K"]:
        """The scores of each row's sequences."""
        return scores[self.places]


def learned_places(count: int, *, most: int) -> list[int]:
    """Which of `count` ranked responses are learned, best first: the better ones and the worst."""
    return list(range(count)) if count <= most else [*range(most - 1), count - 1]


def encode_dialogue(
    chat: ChatFormat, example: Example, response: Turns, *, max_length: int
) -> Encoded:
    """Token ids of the prompt with a response, or of the prompt alone where that is empty.

    What is longer than `max_length` loses its beginning, as the score is read at the end; where
    texts begin with a token of their own, as those of encoders do, that one stays.
    """
    if response:
        whole = chat.encode(example.prompt, response)
    else:
        whole = Encoded.untrained(chat.encode_prompt(example.prompt))
    return whole.tail(max_length, keep_first=chat.begins_with_cls)


def encode_rows(
    examples: Sequence[Example],
    labels: Labels,
    chat: ChatFormat,
    config: RewardConfig,
    *,
    max_length: int,
) -> list[LabelledRow]:
    """Token ids and targets of rows of one kind."""

    def encode(example: Example) -> LabelledRow:
        responses, ranks = responses_of(example, labels, most=config.max_ranked)
        encoded = [
            encode_dialogue(chat, example, each, max_length=max_length) for each in responses
        ]
        return LabelledRow(tuple(encoded), target_of(example, labels), ranks)

    return [encode(example) for example in examples]


def responses_of(
    example: Example, labels: Labels, *, most: int
) -> tuple[list[Turns], tuple[float, ...]]:
    """The responses of a row that are learned, and their ranks where they have some."""
    if labels.kind in OF_LABELS:
        return [example.chosen], ()
    if labels.kind == "rankings" and example.ranks:
        kept = learned_places(len(example.responses), most=most)
        return (
            [example.responses[place] for place in kept],
            tuple(example.ranks[place] for place in kept),
        )
    return [example.chosen, example.rejected], (1.0, 1.0 if example.tie else 2.0)


def target_of(example: Example, labels: Labels) -> float:
    """The number of the class, the number to be learned, or 1 for a tie."""
    if labels.kind in OF_CLASSES:
        return float(labels.class_of(example))
    if labels.kind in OF_LABELS:
        assert isinstance(example.label, int | float)  # as `resolve` checks
        return (example.label - labels.mean) / labels.std
    return float(example.tie)


def cut_rows(rows: Sequence[LabelledRow], config: RewardConfig) -> list[LabelledBatch]:
    """This process's micro-batches of the rows."""
    longest = max(len(row.sequences) for row in rows)
    parts = offline.local_parts(
        [row.num_tokens for row in rows],
        config,
        max_tokens=longest * config.micro_batch_size * config.data.max_length,
        deterministic=config.model.zero.reduction == "deterministic",
    )
    return [collate_rows(rows, part) for part in parts]


def collate_rows(all_rows: Sequence[LabelledRow], numbers: Sequence[int]) -> LabelledBatch:
    """The sequences of the rows of these numbers end to end; where there are none, the first's."""
    rows, spare = [all_rows[number] for number in numbers], all_rows[0]
    present = rows or [spare]
    longest = max(len(row.sequences) for row in present)
    sequences: list[Encoded] = []
    places = torch.zeros(len(rows), longest, dtype=torch.int64)
    ranks = torch.full((len(rows), longest), math.inf)
    for place in range(longest):
        for number, row in enumerate(present):
            if place < len(row.sequences):
                if rows:
                    places[number, place] = len(sequences)
                    ranks[number, place] = row.ranks[place] if row.ranks else 1.0
                sequences.append(row.sequences[place])
    targets = torch.tensor([row.target for row in rows], dtype=torch.float32)
    return LabelledBatch(
        tokens=collate(sequences).to(local_device()),
        places=send(places),
        ranks=send(ranks),
        targets=send(targets),
        numbers=tuple(numbers),
    )
