"""Recorded operators that one kernel repeats."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from inference.engine.replay import OperatorTrace, TraceRecorder


def traced(compute: Callable[[Tensor], Tensor], x: Tensor) -> OperatorTrace:
    with TraceRecorder() as recorder:
        result = compute(x)
    return OperatorTrace(recorder.calls, [x], result)


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_norms_gates_and_rotary_embeddings_of_a_model_are_one_call_each() -> None:
    norm, angles = LlamaRMSNorm(48), torch.randn(1, 5, 16)

    def compute(x: Tensor) -> Tensor:
        heads = (F.silu(norm(x)) * x).view(1, 5, 3, 16).transpose(1, 2)
        queries, keys = apply_rotary_pos_emb(heads, heads[:, :1], angles.cos(), angles.sin())
        return queries * keys

    x = torch.randn(1, 5, 48)
    trace = traced(compute, x)
    x.copy_(torch.randn(1, 5, 48))

    assert len(trace) == 1 + 1 + 2 + 1
    torch.testing.assert_close(trace.replay(), compute(x))


def test_sequences_that_compute_something_else_are_repeated_as_recorded() -> None:
    weight = torch.randn(48)

    def leaking(x: Tensor) -> Tensor:
        square = x.pow(2)
        root = torch.rsqrt(square.mean(-1, keepdim=True) + 1e-5)
        return x * root * weight + square

    def cubed(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-5) * weight

    def of_another(x: Tensor) -> Tensor:
        return (x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight

    def unturned(x: Tensor) -> Tensor:
        first, second = x.view(1, 2, 5, 24).chunk(2, -1)
        return x.view(1, 2, 5, 24) * 2.0 + torch.cat((-first, second), -1) * weight[:24]

    for compute in (leaking, cubed, of_another, unturned):
        x = torch.randn(1, 5, 48)
        trace = traced(compute, x)
        x.copy_(torch.randn(1, 5, 48))
        torch.testing.assert_close(trace.replay(), compute(x))
        assert len(trace) >= 5
