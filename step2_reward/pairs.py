"""Pairs of responses as token ids, and as micro-batches.

Dimension names: B pairs of a micro-batch, S its sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline import offline
from pipeline.data.batches import TokenBatch, collate
from pipeline.data.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Example
from pipeline.data.lengths import Fit
from pipeline.data.stages import StageData
from pipeline.parallel.device import local_device
from step2_reward.config import RewardConfig


@dataclass(frozen=True)
class EncodedPair:
    """Token ids of a prompt with its better and its worse response."""

    chosen: Encoded
    rejected: Encoded
    margin: float

    @property
    def num_tokens(self) -> int:
        """Of both sequences."""
        return len(self.chosen) + len(self.rejected)


@dataclass(frozen=True)
class PairBatch:
    """B pairs as 2 B sequences, the chosen ones first."""

    tokens: TokenBatch
    """Two sequences more where B is 0: a process without pairs still runs the same passes."""

    margin: Float[Tensor, " B"]

    def split(self, scores: Float[Tensor, " S"]) -> tuple[Tensor, Tensor]:
        """Scores of the chosen and of the rejected responses, each (B,)."""
        num_pairs = len(self.margin)
        return scores[:num_pairs], scores[num_pairs : 2 * num_pairs]


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


def check_pairs(data: StageData, chat: ChatFormat, config: RewardConfig) -> None:
    """Say how many pairs are cut; raise DataError where none is left that differs."""
    limit = config.data.max_length

    def fit(examples: Sequence[Example]) -> list[Fit]:
        fits = []
        for each in examples:
            chosen = chat.encode(each.prompt, each.chosen)
            rejected = chat.encode(each.prompt, each.rejected)
            differ = chosen.tail(limit).input_ids != rejected.tail(limit).input_ids
            fits.append(Fit(max(len(chosen), len(rejected)) > limit, int(differ)))
        return fits

    offline.check_rows(
        data, fit, config, rows="pairs", end="beginning", empty="have equal responses"
    )


def cut(pairs: Sequence[EncodedPair], config: RewardConfig) -> list[PairBatch]:
    """This process's micro-batches of the pairs."""
    parts = offline.local_parts(
        [pair.num_tokens for pair in pairs],
        config,
        max_tokens=2 * config.micro_batch_size * config.data.max_length,
        deterministic=config.model.zero.reduction == "deterministic",
    )
    return [collate_pairs([pairs[row] for row in part], spare=pairs[0]) for part in parts]


def collate_pairs(pairs: Sequence[EncodedPair], *, spare: EncodedPair) -> PairBatch:
    """The chosen sequences, then the rejected ones, end to end; `spare` where there are none."""
    present = pairs or [spare]
    sequences = [pair.chosen for pair in present] + [pair.rejected for pair in present]
    margin = torch.tensor([pair.margin for pair in pairs], dtype=torch.float32)
    device = local_device()
    return PairBatch(collate(sequences).to(device), margin.to(device))
