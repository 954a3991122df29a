"""Reading prompts in pieces: which tokens a pass takes of which prompt, and what they see.

Dimension names: N tokens of one forward pass, S slots, M tokens of a slot, G key heads, H query
heads, D and E head sizes.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from pipeline.kernels.choice import kernel_mode
from pipeline.models.attention import continued_attention


class Piece(NamedTuple):
    """Neighbouring tokens of a prompt whose beginning is in a slot already."""

    slot: int
    first: int
    """Position of the first of the tokens."""
    length: int


class Pieces:
    """Pieces of several prompts end to end; each token sees its own prompt up to itself.

    More tokens than those of the pieces are padding; their result is 0.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces

    def attend(
        self,
        query: Float[Tensor, "1 H N D"],
        key: Float[Tensor, "S G M D"],
        value: Float[Tensor, "S G M E"],
        *,
        scaling: float | None,
        sliding_window: int | None,
        dropout: float,
    ) -> Float[Tensor, "1 N H E"]:
        """Causal attention of each piece to its slot."""
        del dropout  # generation has none
        attended = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
        begin = 0
        for piece in self.pieces:
            end = begin + piece.length
            slot = slice(piece.slot, piece.slot + 1)
            attended[:, begin:end] = continued_attention(
                query[:, :, begin:end],
                key[slot],
                value[slot],
                first=piece.first,
                scaling=scaling,
                sliding_window=sliding_window,
                kernels=kernel_mode(),
            )
            begin = end
        return attended


def share_out(left: Sequence[int], most: int) -> list[int]:
    """How many tokens of each prompt a pass of at most `most` takes, of which so many are left.

    The first prompt, which came first, is read to its end, or takes at least half of the pass if it
    is longer. The others come in whole, the shortest first: a short prompt doesn't wait for the end
    of a long one, and none is cut that fits a pass.
    """
    counts = [0] * len(left)
    counts[0] = left[0] if left[0] <= most else most // 2 if len(left) > 1 else most
    room = most - counts[0]
    for place in sorted(range(1, len(left)), key=left.__getitem__):
        if left[place] > room:
            break
        counts[place] = left[place]
        room -= left[place]
    counts[0] += min(room, left[0] - counts[0])
    return counts
