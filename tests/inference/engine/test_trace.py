"""Replay of recorded operators."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from inference.engine.replay import OperatorTrace, TraceRecorder


def record_trace(compute: Callable[[], torch.Tensor], *inputs: torch.Tensor) -> OperatorTrace:
    with torch.inference_mode(), TraceRecorder() as recorder:
        result = compute()
    return OperatorTrace(recorder.calls, inputs, result)


def replay_trace(trace: OperatorTrace) -> torch.Tensor:
    with torch.inference_mode():
        return trace.replay().clone()


def test_replay_uses_the_current_input_values() -> None:
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)

    def compute() -> torch.Tensor:
        hidden = F.silu(F.linear(x, weight, bias))
        left, right = hidden[:, :2], hidden[:, 2:4].mul(0.5)
        return torch.cat((left, -right), dim=-1).transpose(0, 1).reshape(-1) + 1

    trace = record_trace(compute, x)
    first = replay_trace(trace)
    x.copy_(torch.randn(3, 4))

    assert torch.equal(replay_trace(trace), compute())
    assert not torch.equal(replay_trace(trace), first)


def test_replay_updates_external_memory_each_time() -> None:
    indices, cache = torch.tensor([1]), torch.zeros(4)

    def compute() -> torch.Tensor:
        cache.index_copy_(0, indices, torch.ones(1))
        return cache.cumsum(0)

    trace = record_trace(compute, indices)
    indices.fill_(3)

    assert replay_trace(trace).tolist() == [0, 1, 1, 2]
    assert cache.tolist() == [0, 1, 0, 1]
