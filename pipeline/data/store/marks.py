"""What a token file of dialogues has beside the tokens: which are learned, and of which prompt.

A bit for each token says whether its prediction is learned. A record for each document stands for
its row where rows are shared out among the steps, so that a step trains on the same rows packed or
not: the hash of its prompt, the hash of its texts, and what can be learned from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pipeline.config import RowUse

RECORD = np.dtype([("prompt", "<u8"), ("texts", "<u8"), ("uses", "<u8")])

USES: "Sequence[RowUse]" = ("demonstrations", "pairs", "prompts")
"""What the bits of `uses` stand for, from the lowest on."""


@dataclass(frozen=True)
class Marks:
    """The marks of some documents, one after the other."""

    trained: NDArray[np.bool_]
    """Whether the prediction of each token is learned: [tokens]."""

    records: NDArray[np.void]
    """[documents] of `RECORD`."""

    def chosen(self, places: NDArray[np.int64], order: NDArray[np.int64]) -> "Marks":
        """The marks of these tokens and of these documents."""
        return Marks(self.trained[places], self.records[order])


def uses_bits(uses: "Sequence[RowUse]") -> int:
    """The number that stands for these uses."""
    return sum(1 << bit for bit, use in enumerate(USES) if use in uses)


def has_use(bits: int, use: "RowUse") -> bool:
    """Whether a record's number has that use."""
    return use in USES and bool(bits >> USES.index(use) & 1)
