"""Log-probabilities where parts of the output matrix have the rows of some words each.

Several processes may have them, or one that adds as several would (`virtual_parts.py`). Each part's
words are gone through in tiles, and what was found - the logit of the target, the largest, the sum
of exponentials - is put together as that of one more tile would be. So the logits of all words
never are in one place. Sums over the parts are trees in their order.

Dimension names: K targets, d hidden size, W words of this process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pipeline.kernels.logprobs.tiles import of_sums, tile_gradients, tile_sums
from pipeline.parallel.shards import Shard, ShardSpec
from pipeline.parallel.sums import tree_sum
from pipeline.parallel.virtual_parts import VirtualParts


@dataclass(frozen=True)
class Words:
    """The words of which this process has the rows of a matrix."""

    first: int
    """Token id of the first; the others follow."""

    parts: VirtualParts
    """Those that the rows of all words are divided into, equally."""


def rows_of_parts(rows: int, parts: VirtualParts) -> list[ShardSpec]:
    """Where the rows of each of this process's parts lie in its own."""
    share = rows // len(parts.own)
    return [ShardSpec(0, (Shard(at, at + share),)) for at in range(0, rows, share)]


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
    """Tiles of each part's words, computed again on the way back."""

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
        ctx.uses_inputs_alone = True  # for pipeline.engine.graph: it reaches no other parameter
        ctx.words, ctx.temperature, ctx.tile = words, temperature, tile
        own = torch.stack(
            [
                tile_sums(hidden, rows, shift, local, temperature, tile, entropy=entropy)
                for rows, shift, local in _of_parts(weight, bias, targets, words)
            ]
        )
        sums = _of_all_words(own, words.parts)
        return of_sums(ctx, sums, (hidden, weight, bias, targets), entropy=entropy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        of_logprobs, of_entropy = (None if grad is None else grad[:, None] for grad in grads)
        hidden, weight, bias, targets, largest, total, entropies = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        found = [
            tile_gradients(
                (hidden, rows, shift),
                local,
                (largest, total),
                of_logprobs,
                None if of_entropy is None else (of_entropy, entropies),
                wanted=wanted,
                temperature=ctx.temperature,
                tile=ctx.tile,
            )
            for rows, shift, local in _of_parts(weight, bias, targets, ctx.words)
        ]
        of_hidden, of_weight, of_bias = zip(*found, strict=True)
        parts: VirtualParts = ctx.words.parts
        return (
            parts.total(of_hidden, "gradients of hidden states") if wanted[0] else None,
            _joined(of_weight) if wanted[1] else None,
            _joined(of_bias) if wanted[2] else None,
            *[None] * 5,
        )


def _joined(of_parts: Sequence[Tensor]) -> Tensor:
    """The gradient of all rows, which may be as large as all else in the pass: no copy of one."""
    return of_parts[0] if len(of_parts) == 1 else torch.cat(list(of_parts))


def _of_parts(
    weight: Tensor, bias: Tensor | None, targets: Tensor, words: Words
) -> list[tuple[Tensor, Tensor | None, Tensor]]:
    """The matrix, the bias and the targets of each of this process's parts."""
    found: list[tuple[Tensor, Tensor | None, Tensor]] = []
    for rows in rows_of_parts(len(weight), words.parts):
        (shard,) = rows.shards
        own = rows.of(weight), None if bias is None else rows.of(bias)
        found.append((*own, targets - words.first - shard.start))
    return found


def _of_all_words(own: Float[Tensor, "parts 4 K 1"], parts: VirtualParts) -> Float[Tensor, "4 K 1"]:
    """The figures of all words, from those of each of this process's parts."""
    of_all = torch.cat(parts.group.gather(own, what="figures of logits"))
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
