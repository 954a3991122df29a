"""Attention whose gradients are added up in one order on a GPU, where the step asks for that.

PyTorch's backward passes of FlashAttention and of memory-efficient attention take the kernel of one
order only while operators without one are errors. Where these only warn, as in a step
(`pipeline.system.torch_process`), attention alone is held to it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def in_order(attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`attend` of these heads, and gradients of the same bits each time if the step wants them."""
    heads = (query, key, value)
    wanted = query.is_cuda and torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted and torch.is_grad_enabled() and any(each.requires_grad for each in heads):
        return _OneOrder.apply(attend, *heads)
    return attend(*heads)


class _OneOrder(torch.autograd.Function):
    """Keeps the graph of what it computes, and goes back through it where no order is free."""

    @staticmethod
    def forward(ctx: Any, attend: Attend, *heads: Tensor) -> Tensor:  # noqa: ANN401
        with torch.enable_grad():
            ctx.heads = [each.detach().requires_grad_(each.requires_grad) for each in heads]
            ctx.out = attend(*ctx.heads)
        return ctx.out.detach()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator's type
        ctx: Any,  # noqa: ANN401
        grad: Tensor,
    ) -> tuple[Tensor | None, ...]:
        learning = [each for each in ctx.heads if each.requires_grad]
        with _one_order():
            found = iter(torch.autograd.grad(ctx.out, learning, grad))
        del ctx.out  # and all that its graph keeps
        return (None, *(next(found) if each.requires_grad else None for each in ctx.heads))


@contextmanager
def _one_order() -> Iterator[None]:
    """Inside it, an operator without a kernel of one order is an error."""
    torch.use_deterministic_algorithms(mode=True, warn_only=False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
