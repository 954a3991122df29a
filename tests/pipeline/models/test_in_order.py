"""Attention is held to one order of additions, and nothing else is."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pipeline.models.attention import _OneOrder, in_order


class Watched(torch.autograd.Function):
    """Keeps whether an operator without one order only warned on the way back."""

    warns: list[bool]

    @staticmethod
    def forward(ctx: Any, heads: Tensor) -> Tensor:
        del ctx
        return heads.clone()

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> Tensor:
        del ctx
        Watched.warns.append(torch.is_deterministic_algorithms_warn_only_enabled())
        return grad


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = scaled_dot_product_attention(query, key, value, is_causal=True)
    return Watched.apply(out)  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("frozen", [(), (1,), (0, 2)])
def test_gradients_are_those_of_attention_and_only_its_way_back_is_strict(
    frozen: tuple[int, ...],
) -> None:
    drawn = torch.randn(3, 2, 2, 9, 16, generator=torch.Generator().manual_seed(0))
    ours, theirs = (
        [each.clone().requires_grad_(place not in frozen) for place, each in enumerate(drawn)]
        for _ in range(2)
    )
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        Watched.warns = []
        one: Any = _OneOrder.apply(causal, *ours)
        Watched.apply(one).square().sum().backward()
        after = torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(mode=False)

    assert Watched.warns == [True, False]
    assert after
    other = causal(*theirs)
    other.square().sum().backward()
    assert torch.equal(one, other)
    pairs = [(mine.grad, other.grad) for mine, other in zip(ours, theirs, strict=True)]
    assert [place for place, pair in enumerate(pairs) if pair == (None, None)] == list(frozen)
    assert all(torch.equal(a, b) for a, b in pairs if a is not None and b is not None)


def test_on_a_cpu_attention_is_called_as_it_is() -> None:
    heads = torch.randn(3, 1, 2, 5, 16).unbind()
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        out = in_order(scaled_dot_product_attention, *(each.requires_grad_() for each in heads))
    finally:
        torch.use_deterministic_algorithms(mode=False)

    assert "_OneOrder" not in str(out.grad_fn)
