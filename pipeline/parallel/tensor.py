"""What processes that compute a layer together hand each other, with its gradient.

Shoeybi et al. 2019 (Megatron-LM), section 3: f and g. Each function is the other's backward pass.
Sums are trees in rank order, in fp32 and rounded once, so that all processes have the same bits, by
whatever transport they travel.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.parallel.group import Group, tree_sum


def copy_to_group(values: Float[Tensor, "*S"], group: Group) -> Float[Tensor, "*S"]:
    """What all processes have and each uses with its part; backward the sum of their gradients."""
    return _Copy.apply(values, group)


def sum_over_group(values: Float[Tensor, "*S"], group: Group) -> Float[Tensor, "*S"]:
    """The sum of what the processes found; backward all have its gradient."""
    return _Sum.apply(values, group)


def join_over_group(part: Float[Tensor, "*B n"], group: Group) -> Float[Tensor, "*B m"]:
    """The processes' last dimensions side by side; backward each has that of its part."""
    return _Join.apply(part, group)


def split_over_group(values: Float[Tensor, "*B m"], group: Group) -> Float[Tensor, "*B n"]:
    """This process's share of the last dimension; backward the shares are joined."""
    return _Split.apply(values, group)


def _summed(values: Tensor, group: Group, what: str) -> Tensor:
    return tree_sum(group.gather(values, what=what))


def _joined(part: Tensor, group: Group, what: str) -> Tensor:
    return torch.cat(group.gather(part, what=what), dim=-1)


def _share(values: Tensor, group: Group) -> Tensor:
    return values.chunk(group.size, dim=-1)[group.rank].contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return _summed(gradients[0], ctx.group, "gradients of hidden states"), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, values: Tensor, group: Group) -> Tensor:  # noqa: ANN401
        return _summed(values, group, "hidden states")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401, ARG004
        return gradients[0], None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return _joined(part, group, "outputs")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return _share(gradients[0], ctx.group), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return _share(values, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return _joined(gradients[0], ctx.group, "gradients of inputs"), None
