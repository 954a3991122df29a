"""Operators that can't be replayed are rejected during recording."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from inference.engine.replay import ReplayError, TraceRecorder


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda x: x + torch.rand_like(x), "rand_like can't be replayed"),
        (lambda x: x[x > 0], "the output shape of index depends on data"),
        (torch.nonzero, "the output shape of nonzero depends on data"),
        (lambda x: x * float(x.sum()), "item returns a value to Python"),
        (lambda x: x * x.tolist()[0], "tolist returns values to Python"),
        (lambda x: x if torch.equal(x, x + 1) else -x, "equal"),
    ],
)
def test_computation_that_depends_on_more_than_its_inputs_is_rejected(
    compute: Callable[[Tensor], Tensor], reason: str
) -> None:
    with torch.inference_mode(), pytest.raises(ReplayError, match=reason), TraceRecorder():
        compute(torch.ones(3))
