"""What is known of a backward pass before it begins."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.engine.graph import parameter_uses


def test_each_use_of_a_parameter_is_counted() -> None:
    once, twice, never = (nn.Parameter(torch.ones(2)) for _ in range(3))

    uses = parameter_uses((once * twice).sum() + twice.square().sum())

    assert uses is not None
    assert (uses[once], uses[twice], uses[never]) == (1, 2, 0)


def test_both_sides_of_one_operation_are_two_uses() -> None:
    param = nn.Parameter(torch.ones(2))

    assert parameter_uses((param * param).sum()) == {param: 2}


def test_a_loss_without_a_graph_uses_nothing() -> None:
    assert parameter_uses(torch.zeros(())) == {}


def test_a_path_that_is_reached_twice_is_counted_once() -> None:
    param = nn.Parameter(torch.ones(2))
    between = 2 * param

    assert parameter_uses((between + between.exp()).sum()) == {param: 1}


class Double(torch.autograd.Function):
    """It keeps its input under a name that autograd's own nodes use."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.variable = x
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        return 2 * grads[0]


def test_what_a_function_written_in_python_goes_back_through_is_not_known() -> None:
    param = nn.Parameter(torch.ones(2))

    assert parameter_uses(Double.apply(param).sum()) is None
    assert parameter_uses(checkpoint(torch.exp, param, use_reentrant=True).sum()) is None


def test_checkpointing_that_is_not_reentrant_is_seen_through() -> None:
    param = nn.Parameter(torch.ones(2))

    assert parameter_uses(checkpoint(torch.exp, param, use_reentrant=False).sum()) == {param: 1}
