"""Pairs of responses as token ids, and as one batch.

Dimension names: B pairs of a micro-batch, S its sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.data.batches import TokenBatch, collate
from pipeline.data.examples import Encoded
from pipeline.parallel.device import local_device, send


@dataclass(frozen=True)
class EncodedPair:
    """Token ids of a prompt with its better and its worse response."""

    chosen: Encoded
    rejected: Encoded
    margin: float

    @property
    def num_tokens(self) -> int:
        """Tokens of both sequences."""
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


def collate_pairs(pairs: Sequence[EncodedPair], *, spare: EncodedPair) -> PairBatch:
    """The chosen sequences, then the rejected ones, end to end; `spare` where there are none."""
    present = pairs or [spare]
    sequences = [pair.chosen for pair in present] + [pair.rejected for pair in present]
    margin = torch.tensor([pair.margin for pair in pairs], dtype=torch.float32)
    return PairBatch(collate(sequences).to(local_device()), send(margin))
