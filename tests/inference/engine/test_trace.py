"""Operators that a trace replays, omits and refuses."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from inference.engine.replay import OperatorTrace, TraceRecorder


def written(compute: Callable[[], torch.Tensor], *inputs: torch.Tensor) -> OperatorTrace:
    with torch.inference_mode(), TraceRecorder() as recorder:
        result = compute()
    return OperatorTrace(recorder.calls, inputs, result)


def repeated(trace: OperatorTrace) -> torch.Tensor:
    with torch.inference_mode():
        return trace.replay().clone()


def test_it_computes_again_from_what_the_inputs_hold() -> None:
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)

    def compute() -> torch.Tensor:
        hidden = F.silu(F.linear(x, weight, bias))
        left, right = hidden[:, :2], hidden[:, 2:4].mul(0.5)
        return torch.cat((left, -right), dim=-1).transpose(0, 1).reshape(-1) + 1

    trace = written(compute, x)
    first = repeated(trace)
    x.copy_(torch.randn(3, 4))

    assert torch.equal(repeated(trace), compute())
    assert not torch.equal(repeated(trace), first)


def test_memory_from_outside_is_changed_each_time() -> None:
    places, cache = torch.tensor([1]), torch.zeros(4)

    def compute() -> torch.Tensor:
        cache.index_copy_(0, places, torch.ones(1))
        return cache.cumsum(0)

    trace = written(compute, places)
    places.fill_(3)

    assert repeated(trace).tolist() == [0, 1, 1, 2]
    assert cache.tolist() == [0, 1, 0, 1]
