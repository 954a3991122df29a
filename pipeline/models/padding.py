"""Rows of concatenated sequences, copied to padded rows and back.

The gradient of either copy is a copy as well: padding has none, so nothing need be zeroed and added
up, which is what the gradient of an indexed read does.

Dimension names: N real rows, P padded rows.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable


def pad(
    rows: Float[Tensor, "N ..."], source: Int[Tensor, " P"], place: Int[Tensor, " N"]
) -> Float[Tensor, "P ..."]:
    """Row `source[p]` at each p; `place[n]` is where row n is real, and any other place is padding.

    Padding must take no part in the loss: its gradient, which would be 0, is never read.
    """
    return _Pad.apply(rows, source, place)  # pyright: ignore[reportReturnType]


def unpad(padded: Float[Tensor, "P ..."], place: Int[Tensor, " N"]) -> Float[Tensor, "N ..."]:
    """The real rows, of which row n is at `place[n]`; padding gets the gradient 0."""
    return _Unpad.apply(padded, place)  # pyright: ignore[reportReturnType]


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, place: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(place)
        return rows.index_select(0, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place), None, None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: Tensor, place: Tensor) -> Tensor:  # noqa: ANN401
        ctx.padded = len(padded)
        ctx.save_for_backward(place)
        return padded.index_select(0, place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        (place,) = ctx.saved_tensors
        padded = grad.new_zeros(ctx.padded, *grad.shape[1:])
        return padded.index_copy_(0, place, grad), None
