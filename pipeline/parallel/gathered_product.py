"""Matrix products with the tokens of all processes, of which each keeps its own.

Autograd would keep what a product reads until the way back: the tokens of all, on each process.
Here a process keeps its own, and they are gathered once more where the gradient of a weight needs
them (Korthikanti et al. 2022, section 4.2.2), for all products that read the same together.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from pipeline.parallel.group import Group
from pipeline.parallel.tokens import joined_tokens


class Reading:
    """A row that some products read, each once."""

    def __init__(self, tokens: int, group: Group) -> None:
        self._tokens, self._group = tokens, group
        self._whole: Tensor | None = None
        self.left = 0
        """Products whose way back will ask for it."""

    def again(self, share: Float[Tensor, "*B n d"]) -> Float[Tensor, "*B N d"]:
        """The tokens of all processes; kept until the last product has asked."""
        whole = self._whole
        if whole is None:
            whole = joined_tokens(share, self._tokens, self._group, "tokens")
        self.left -= 1
        self._whole = whole if self.left > 0 else None
        return whole


def gathered_product(
    whole: Float[Tensor, "*B N d"],
    share: Float[Tensor, "*B n d"],
    weight: Tensor,
    bias: Float[Tensor, " m"] | None,
    reading: Reading,
    *,
    transposed: bool,
) -> Float[Tensor, "*B N m"]:
    """What a linear layer gives, to the bit, with its gradients; all processes call it.

    Args:
        whole: the tokens of all processes, with a graph.
        share: this process's among them.
        weight: (m, d), or (d, m) where it is `transposed`, as that of a Conv1D.
        bias: of the layer, or None.
        reading: the same for all products with `whole`.
        transposed: how the weight lies.
    """
    return _Product.apply(whole, share, weight, bias, reading, transposed)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        whole: Tensor,
        share: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        reading: Reading,
        transposed: bool,  # noqa: FBT001
    ) -> Tensor:
        ctx.reading, ctx.transposed = reading, transposed
        learns = ctx.needs_input_grad[2]
        reading.left += learns
        ctx.save_for_backward(share if learns else None, weight)
        return F.linear(whole, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        share, weight = ctx.saved_tensors
        (gradient,) = gradients
        rows = gradient.flatten(0, -2)
        of_whole = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_whole = gradient @ (weight.t() if ctx.transposed else weight)
        if ctx.needs_input_grad[2]:
            read = ctx.reading.again(share).flatten(0, -2)
            of_weight = read.t() @ rows if ctx.transposed else rows.t() @ read
        if ctx.needs_input_grad[3]:
            of_bias = rows.sum(0)
        return of_whole, None, of_weight, of_bias, None, None
