"""Operators that can't be repeated are refused while they are recorded."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from inference.engine.replay import ReplayError, TraceRecorder


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda x: x + torch.rand_like(x), "rand_like can't be repeated"),
        (lambda x: x[x > 0], "the size of the result of index depends on numbers"),
        (torch.nonzero, "the size of the result of nonzero depends on numbers"),
        (lambda x: x * float(x.sum()), "item returns a number to Python"),
        (lambda x: x * x.tolist()[0], "tolist returns numbers to Python"),
        (lambda x: x if torch.equal(x, x + 1) else -x, "equal"),
    ],
)
def test_a_computation_that_depends_on_more_than_its_inputs_is_refused(
    compute: Callable[[Tensor], Tensor], reason: str
) -> None:
    with torch.inference_mode(), pytest.raises(ReplayError, match=reason), TraceRecorder():
        compute(torch.ones(3))
