"""Reading prompts in pieces: which tokens a pass takes of which prompt, and what they see.

Dimension names: N tokens of one forward pass, S slots, M tokens of a slot, G key heads, H query
heads, D and E head sizes.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from inference.engine.cache import NextToken
from pipeline.kernels.decode_attention.dispatch import sequence_attention
from pipeline.models.attention import Layout, continued_attention

FEW = 24
"""Tokens of a piece up to which the kernel of decoding is the faster one."""


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
            if piece.length <= FEW and sequence_attention(
                query[0, :, begin:end].transpose(0, 1),
                key[slot],
                value[slot],
                first=piece.first,
                scaling=query.shape[3] ** -0.5 if scaling is None else scaling,
                sliding_window=sliding_window,
                out=attended[0, begin:end],
            ):
                begin = end
                continue
            attended[:, begin:end] = continued_attention(
                query[:, :, begin:end],
                key[slot],
                value[slot],
                first=piece.first,
                scaling=scaling,
                sliding_window=sliding_window,
            )
            begin = end
        return attended


class NextTokenAndPieces:
    """One token of each running sequence, and behind them pieces of prompts, in one pass.

    Args:
        step: of the running sequences.
        pieces: the others' tokens.
        reads_pieces: whether the logits after tokens of pieces are read.
    """

    def __init__(self, step: NextToken, pieces: Pieces, *, reads_pieces: bool) -> None:
        self._step = step
        self._pieces = pieces
        self.lengths = step.lengths
        self.num_rows = step.num_rows + sum(piece.length for piece in pieces.pieces)
        """Rows that are no padding."""
        self.num_read = self.num_rows if reads_pieces else step.num_rows
        """How many of the first rows have logits that are read."""

    def attend(
        self,
        query: Float[Tensor, "1 H N D"],
        key: Float[Tensor, "S G M D"],
        value: Float[Tensor, "S G M E"],
        *,
        scaling: float | None,
        sliding_window: int | None,
        dropout: float,
        out: Float[Tensor, "1 N H E"] | None = None,
    ) -> Float[Tensor, "1 N H E"]:
        """Attention of each row as its own layout has it, into `out` if given."""
        attend = partial(
            _attend, key=key, value=value, scaling=scaling, window=sliding_window, dropout=dropout
        )
        count = self._step.num_rows
        if out is None:
            out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
        out[:, :count] = attend(self._step, query[:, :, :count])
        out[:, count:] = attend(self._pieces, query[:, :, count:])
        return out


def _attend(
    layout: Layout,
    query: Float[Tensor, "1 H N D"],
    *,
    key: Float[Tensor, "S G M D"],
    value: Float[Tensor, "S G M E"],
    scaling: float | None,
    window: int | None,
    dropout: float,
) -> Float[Tensor, "1 N H E"]:
    return layout.attend(query, key, value, scaling=scaling, sliding_window=window, dropout=dropout)


StepLayout = NextToken | NextTokenAndPieces
"""Which tokens a step computes: the next of each sequence, and maybe pieces of prompts."""


def share_out(left: Sequence[int], most: int) -> list[int]:
    """How many tokens of each prompt a pass of at most `most` takes, of which that many are left.

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
