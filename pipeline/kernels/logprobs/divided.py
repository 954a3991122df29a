"""Log-probabilities where each process of a group has the rows of the output matrix of some words.

Each process computes its logits in tiles. The logit of the target, the largest logit and the sum of
exponentials of all processes are combined as those of several tiles are, so no process ever has the
logits of all words. Sums over the processes are trees in rank order.

Dimension names: K targets, d hidden size, W words of this process.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pipeline.kernels.logprobs.tiles import of_sums, tile_gradients, tile_sums
from pipeline.parallel.group import Group
from pipeline.parallel.sums import tree_sum


@dataclass(frozen=True)
class Words:
    """The words of which this process has the rows of a matrix."""

    first: int
    """Token id of the first; the others follow."""

    group: Group
    """The processes that have equal shares of the rows of all words."""


def divided_logprobs(
    hidden: Float[Tensor, "K d"],
    weight: Float[Tensor, "W d"],
    bias: Float[Tensor, " W"] | None,
    targets: Int[Tensor, " K"],
    words: Words,
    *,
    temperature: float,
    entropy: bool,
    tile: int,
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"] | None]:
    """Log-probability of each target, and the entropy if asked for; all of the group call it.

    Args:
        hidden: what predicts each target, the same on all processes.
        weight: this process's rows of the output matrix.
        bias: the same of the output's bias, or None.
        targets: token ids, of all words.
        words: which rows they are.
        temperature: divides the logits.
        entropy: whether the entropy of each distribution is asked for; it has a graph.
        tile: logits of a tile.
    """
    return _Divided.apply(hidden, weight, bias, targets, words, temperature, tile, entropy)


class _Divided(torch.autograd.Function):
    """Tiles of this process's words, computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        words: Words,
        temperature: float,
        tile: int,
        entropy: bool,  # noqa: FBT001  # torch passes by position
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.words, ctx.temperature, ctx.tile = words, temperature, tile
        local = targets - words.first
        own = tile_sums(hidden, weight, bias, local, temperature, tile, entropy=entropy)
        sums = _of_all_words(own, words.group)
        return of_sums(ctx, sums, (hidden, weight, bias, targets), entropy=entropy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        of_logprobs, of_entropy = (None if grad is None else grad[:, None] for grad in grads)
        hidden, weight, bias, targets, largest, total, entropies = ctx.saved_tensors
        wanted, words = ctx.needs_input_grad[:3], ctx.words
        of_hidden, of_weight, of_bias = tile_gradients(
            (hidden, weight, bias),
            targets - words.first,
            (largest, total),
            of_logprobs,
            None if of_entropy is None else (of_entropy, entropies),
            wanted=wanted,
            temperature=ctx.temperature,
            tile=ctx.tile,
        )
        if wanted[0]:
            parts = words.group.gather(of_hidden, what="gradients of hidden states")
            of_hidden = tree_sum(parts)
        return of_hidden, of_weight, of_bias, *[None] * 5


def _of_all_words(own: Float[Tensor, "4 K 1"], group: Group) -> Float[Tensor, "4 K 1"]:
    """The figures of all words, from those of this process's."""
    of_all = torch.stack(group.gather(own, what="figures of logits"))
    chosen, largest, total, weighted = of_all.unbind(dim=1)
    has_target = ~chosen.isnan()
    one = torch.where(has_target, chosen, 0.0).sum(dim=0)
    most = largest.amax(dim=0)
    shrunk = (largest - most).exp()
    moved = weighted + total * (largest - most)
    return torch.stack(
        [
            torch.where(has_target.any(dim=0), one, float("nan")),
            most,
            tree_sum(list(total * shrunk)),
            tree_sum(list(moved * shrunk)),
        ]
    )
