"""Log-probabilities where each of several processes has some words of the output matrix.

Each goes through its own words in tiles, and what it found - the logit of the target, the largest,
the sum of exponentials - is put together as that of one more tile would be. So the logits of all
words never are in one place. Sums over the processes are trees in rank order.

Dimension names: K targets, d hidden size, W words of this process.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pipeline.kernels.logprobs.tiles import RecomputeLogprobs
from pipeline.parallel.group import Group
from pipeline.parallel.sums import tree_sum
from pipeline.parallel.tensor import copy_to_group


@dataclass(frozen=True)
class Words:
    """The words of which this process has the rows of a matrix."""

    first: int
    """Token id of the first; the others follow."""

    group: Group
    """The processes that have the rows of all words."""


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
    copied = copy_to_group(hidden, words.group)
    local = targets - words.first
    return RecomputeLogprobs.apply(
        copied,
        weight,
        bias,
        local,
        temperature,
        tile,
        entropy,
        lambda own: _of_all_words(own, words.group),
    )


def _of_all_words(own: Float[Tensor, "4 K 1"], group: Group) -> Float[Tensor, "4 K 1"]:
    """The figures of all words, from those of each process's."""
    parts = torch.stack(group.gather(own, what="figures of logits"))
    chosen, largest, total, weighted = parts.unbind(dim=1)
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
