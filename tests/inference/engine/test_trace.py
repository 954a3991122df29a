"""Replay of recorded operators, some of them fused into single kernels."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from inference.engine.replay import OperatorTrace, TraceRecorder
from pipeline.models.adapters.quantized import QuantizedLinear


def capture_trace(compute: Callable[[Tensor], Tensor], x: Tensor) -> OperatorTrace:
    with TraceRecorder() as recorder:
        result = compute(x)
    return OperatorTrace(recorder.calls, [x], result)


@pytest.fixture(autouse=True)
def _inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_replay_uses_the_current_input_values() -> None:
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)

    def compute(x: Tensor) -> Tensor:
        hidden = F.silu(F.linear(x, weight, bias))
        left, right = hidden[:, :2], hidden[:, 2:4].mul(0.5)
        return torch.cat((left, -right), dim=-1).transpose(0, 1).reshape(-1) + 1

    trace = capture_trace(compute, x)
    first = trace.replay().clone()
    x.copy_(torch.randn(3, 4))

    assert torch.equal(trace.replay(), compute(x))
    assert not torch.equal(trace.replay(), first)


def test_replay_updates_external_memory_each_time() -> None:
    indices, cache = torch.tensor([1]), torch.zeros(4)

    def compute(indices: Tensor) -> Tensor:
        cache.index_copy_(0, indices, torch.ones(1))
        return cache.cumsum(0)

    trace = capture_trace(compute, indices)
    indices.fill_(3)

    assert trace.replay().tolist() == [0, 1, 1, 2]
    assert cache.tolist() == [0, 1, 0, 1]


def test_quantized_layer_is_one_call_that_keeps_no_dequantized_weight() -> None:
    layer, x = QuantizedLinear(nn.Linear(64, 32), "nf4"), torch.randn(2, 64)
    trace = capture_trace(layer, x)
    x.copy_(torch.randn(2, 64))

    assert len(trace) == 1
    torch.testing.assert_close(trace.replay(), layer(x))


def test_norms_gates_adapters_and_rotary_embeddings_are_fused() -> None:
    norm, angles = LlamaRMSNorm(48), torch.randn(1, 5, 16)
    down, up = torch.randn(4, 48) / 7, torch.randn(48, 4)

    def compute(x: Tensor) -> Tensor:
        x = x + F.linear(F.linear(x, down), up) * 0.5
        heads = (F.silu(norm(x)) * x).view(1, 5, 3, 16).transpose(1, 2)
        queries, keys = apply_rotary_pos_emb(heads, heads[:, :1], angles.cos(), angles.sin())
        return queries * keys

    x = torch.randn(1, 5, 48)
    trace = capture_trace(compute, x)
    x.copy_(torch.randn(1, 5, 48))

    assert len(trace) == 2 + 1 + 1 + 2 + 1
    torch.testing.assert_close(trace.replay(), compute(x), rtol=1e-5, atol=1e-5)


def test_similar_operator_sequences_are_not_fused() -> None:
    weight = torch.randn(48)

    def intermediate_used(x: Tensor) -> Tensor:
        square = x.pow(2)
        root = torch.rsqrt(square.mean(-1, keepdim=True) + 1e-5)
        return x * root * weight + square

    def cubed_norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-5) * weight

    def norm_of_other_input(x: Tensor) -> Tensor:
        return (x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight

    def partial_rotation(x: Tensor) -> Tensor:
        first, second = x.view(1, 2, 5, 24).chunk(2, -1)
        return x.view(1, 2, 5, 24) * 2.0 + torch.cat((-first, second), -1) * weight[:24]

    def scaled_layers(x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + F.linear(x, torch.eye(48)) * 2.0
        return x

    others = (cubed_norm, norm_of_other_input, partial_rotation, scaled_layers)
    for compute in (intermediate_used, *others):
        x = torch.randn(1, 5, 48)
        trace = capture_trace(compute, x)
        x.copy_(torch.randn(1, 5, 48))
        torch.testing.assert_close(trace.replay(), compute(x))
        assert len(trace) >= 5
