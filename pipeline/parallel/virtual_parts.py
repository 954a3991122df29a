"""Virtual parts of a layer: sums that are the same bits on one process as on many.

A sum over processes is rounded as their number has it. Here layers are computed as N parts, a power
of two that all numbers of processes divide: a process has N / tp of them, side by side, and what
they find is added as one binary tree over N, within the process over its own parts, which are a
subtree, and then over the processes. Each part is computed by itself, in the shapes that it has on
N processes, so that nothing hangs on how a library computes a larger product.

Sums are in fp32 and rounded once, as those of `pipeline.parallel.tensor`, to which these functions
come down where each process has one part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from pipeline.parallel.group import Group
from pipeline.parallel.shards import ShardSpec
from pipeline.parallel.sums import tree_sum


@dataclass(frozen=True)
class VirtualParts:
    """The parts that layers are computed as, and which of them this process has."""

    count: int
    """Of all processes; a power of two."""

    group: Group
    """The processes that compute each layer together; one may be alone."""

    @property
    def own(self) -> range:
        """Numbers of this process's parts."""
        each = self.count // self.group.size
        return range(self.group.rank * each, (self.group.rank + 1) * each)

    def total(self, own: Sequence[Tensor], what: str) -> Tensor:
        """The sum of what all parts found, from this process's; all processes call it."""
        dtype = own[0].dtype
        if len(own) > 1:
            own = [tree_sum([each.float() for each in own])]
        return tree_sum(self.group.gather(own[0], what=what)).to(dtype)


def feed_parts(values: Float[Tensor, "*S"], parts: VirtualParts) -> tuple[Tensor, ...]:
    """What all parts read, once for each of this process's; backward the sum of all gradients."""
    return _Feed.apply(values, parts)


def add_parts(found: Sequence[Float[Tensor, "*S"]], parts: VirtualParts) -> Float[Tensor, "*S"]:
    """The sum of what all parts found; backward each has its gradient."""
    return _Add.apply(parts, *found)


def join_parts(found: Sequence[Float[Tensor, "*B n"]], parts: VirtualParts) -> Tensor:
    """The last dimensions of all parts side by side; backward each has that of its own."""
    return _Join.apply(parts, *found)


def split_columns(values: Float[Tensor, "*B m"], parts: VirtualParts) -> tuple[Tensor, ...]:
    """This process's last dimension as that of each of its parts; backward they are joined."""
    return _Split.apply(values, len(parts.own))


def cut_weight(weight: Tensor, pieces: Sequence[ShardSpec]) -> tuple[Tensor, ...]:
    """The weight of each part; backward the gradient of the weight, put together once.

    It need not lie as the weight of one process: what reads it does so.

    Args:
        weight: of which each element belongs to one part.
        pieces: where the elements of each part lie in it.
    """
    return _Cut.apply(weight, tuple(pieces))


def ending_product(
    values: Float[Tensor, "*B n"], weight: Float[Tensor, "_ _"], *, is_turned: bool
) -> Float[Tensor, "*B m"]:
    """What a part adds to the sum, from columns of a weight (m, n), or (n, m) where it is turned.

    The columns lie apart in the weight of a process with several parts. For the product, and for
    its gradients, they are laid side by side, as they lie on a process with one: libraries, and
    autograd, choose their ways by that. No copy stays.
    """
    return _Ending.apply(values, weight, is_turned)


def share_weights(weights: Sequence[Tensor], parts: VirtualParts) -> list[tuple[Tensor, ...]]:
    """Whole weights that each part uses, for each part; backward the sums of all gradients.

    One collective for all of them.
    """
    flat = _Share.apply(parts, *weights)
    return [flat[first :: len(parts.own)] for first in range(len(parts.own))]


class _Feed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, parts: VirtualParts) -> tuple[Tensor, ...]:  # noqa: ANN401
        ctx.parts = parts
        ctx.uses_inputs_alone = True  # for pipeline.engine.graph: it reaches no parameter
        return tuple(values.data.view_as(values) for _ in parts.own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return ctx.parts.total(gradients, "gradients of hidden states"), None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: VirtualParts, *found: Tensor) -> Tensor:  # noqa: ANN401
        ctx.own = len(found)
        ctx.uses_inputs_alone = True
        return parts.total(found, "hidden states")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        return None, *gradients * ctx.own


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: VirtualParts, *found: Tensor) -> Tensor:  # noqa: ANN401
        ctx.parts, ctx.width = parts, found[0].shape[-1]
        ctx.uses_inputs_alone = True
        own = torch.cat(found, dim=-1)
        return torch.cat(parts.group.gather(own, what="outputs"), dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        of_all = gradients[0].split(ctx.width, dim=-1)
        return None, *(of_all[part].contiguous() for part in ctx.parts.own)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, count: int) -> tuple[Tensor, ...]:  # noqa: ANN401
        ctx.uses_inputs_alone = True
        return tuple(
            each.clone(memory_format=torch.contiguous_format) for each in values.chunk(count, -1)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401, ARG004
        return torch.cat(gradients, dim=-1), None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, pieces: tuple[ShardSpec, ...]) -> tuple[Tensor, ...]:  # noqa: ANN401
        ctx.pieces, ctx.shape = pieces, weight.shape
        ctx.uses_inputs_alone = True
        # Of `.data`: what the engine does with the vector that it is a view of is no change to it.
        return tuple(piece.of(weight.data) for piece in pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        whole = gradients[0].new_empty(ctx.shape)
        for piece, gradient in zip(ctx.pieces, gradients, strict=True):
            piece.put(gradient, whole)
        return whole, None


class _Ending(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, is_turned: bool) -> Tensor:  # noqa: ANN401, FBT001
        ctx.is_turned = is_turned
        ctx.uses_inputs_alone = True
        ctx.save_for_backward(values if ctx.needs_input_grad[1] else None, weight)
        own = weight.contiguous()
        return F.linear(values, own.t() if is_turned else own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        values, weight = ctx.saved_tensors
        (gradient,) = gradients
        of_values = of_weight = None
        if ctx.needs_input_grad[0]:
            own = weight.contiguous()
            of_values = gradient @ (own.t() if ctx.is_turned else own)
        if ctx.needs_input_grad[1]:
            rows, read = gradient.flatten(0, -2), values.flatten(0, -2)
            of_weight = read.t() @ rows if ctx.is_turned else rows.t() @ read
        return of_values, of_weight, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: VirtualParts, *weights: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        ctx.parts = parts
        ctx.uses_inputs_alone = True
        return tuple(each.data.view_as(each) for each in weights for _ in parts.own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        parts: VirtualParts = ctx.parts
        count = len(parts.own)
        of_weights = [gradients[at : at + count] for at in range(0, len(gradients), count)]
        by_part = zip(*of_weights, strict=True)
        flat = [torch.cat([each.float().flatten() for each in part]) for part in by_part]
        sums = parts.total(flat, "gradients of shared weights")
        found = sums.split([each[0].numel() for each in of_weights])
        pairs = zip(found, of_weights, strict=True)
        return None, *(total.view_as(each[0]).to(each[0].dtype) for total, each in pairs)
