"""What processes that compute a layer together hand each other, where each has tokens of its own.

Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models"), section
4.2.2: g and its conjugate. Before layers of which a process has a part the tokens of all are
gathered, after them what the processes found is summed, each for its own tokens. The other two
functions stand where hidden states are whole again. Sums are trees in rank order, in fp32 and
rounded once: the bits of `pipeline.parallel.tensor`.

A process has a stretch of the row, all as long: behind the last token zeros fill the stretches.
Dimension names: N tokens, n of one process, d hidden size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from pipeline.parallel.group import Group, tree_sum


def share_tokens(values: Float[Tensor, "*B N d"], group: Group) -> Float[Tensor, "*B n d"]:
    """This process's tokens of what all have; backward the gradients of all are gathered."""
    return _Share.apply(values, group)


def whole_tokens(
    share: Float[Tensor, "*B n d"], tokens: int, group: Group
) -> Float[Tensor, "*B N d"]:
    """All `tokens`, for what all compute alike; backward each has the gradient of its own."""
    return _Whole.apply(share, tokens, group)


def gather_tokens(
    share: Float[Tensor, "*B n d"], tokens: int, group: Group
) -> Float[Tensor, "*B N d"]:
    """All `tokens`, for what each computes a part of; backward their gradients are summed."""
    return _Gather.apply(share, tokens, group)


def sum_to_tokens(values: Float[Tensor, "*B N d"], group: Group) -> Float[Tensor, "*B n d"]:
    """The sum of what the processes found, for this one's tokens; backward all are gathered."""
    return _SumTo.apply(values, group)


def _stretches(values: Tensor, group: Group) -> Tensor:
    """The tokens cut into equal stretches, one for each process: (processes, *B, n, d)."""
    each = -(-values.shape[-2] // group.size)
    filled = F.pad(values, (0, 0, 0, each * group.size - values.shape[-2]))
    return filled.unflatten(-2, (group.size, each)).movedim(-3, 0)


def _own(values: Tensor, group: Group) -> Tensor:
    return _stretches(values, group)[group.rank].clone(memory_format=torch.contiguous_format)


def joined_tokens(
    share: Float[Tensor, "*B n d"], tokens: int, group: Group, what: str
) -> Float[Tensor, "*B N d"]:
    """All `tokens`, without a graph; all processes call it, for `what` if one of them fails."""
    whole = torch.cat(group.gather(share, what=what), dim=-2)
    return whole if whole.shape[-2] == tokens else whole[..., :tokens, :].clone()


def _summed(values: Tensor, group: Group, what: str) -> Tensor:
    return tree_sum(group.exchange(_stretches(values, group), what=what).unbind())


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group) -> Tensor:  # noqa: ANN401
        ctx.group, ctx.tokens = group, values.shape[-2]
        return _own(values, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return joined_tokens(gradients[0], ctx.tokens, ctx.group, "gradients of tokens"), None


class _Joined(torch.autograd.Function):
    """The tokens of all; what follows decides how their gradients become those of a share."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, tokens: int, group: Group) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return joined_tokens(share, tokens, group, "tokens")


class _Whole(_Joined):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        return _own(gradients[0], ctx.group), None, None


class _Gather(_Joined):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        return _summed(gradients[0], ctx.group, "gradients of tokens"), None, None


class _SumTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group) -> Tensor:  # noqa: ANN401
        ctx.group, ctx.tokens = group, values.shape[-2]
        return _summed(values, group, "tokens")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return joined_tokens(gradients[0], ctx.tokens, ctx.group, "gradients of tokens"), None
