"""Fusion of recorded operators into single kernels."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from inference.engine.replay import OperatorTrace, TraceRecorder


def capture_trace(compute: Callable[[Tensor], Tensor], x: Tensor) -> OperatorTrace:
    with TraceRecorder() as recorder:
        result = compute(x)
    return OperatorTrace(recorder.calls, [x], result)


@pytest.fixture(autouse=True)
def _inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_norms_gates_and_rotary_embeddings_are_fused() -> None:
    norm, angles = LlamaRMSNorm(48), torch.randn(1, 5, 16)

    def compute(x: Tensor) -> Tensor:
        heads = (F.silu(norm(x)) * x).view(1, 5, 3, 16).transpose(1, 2)
        queries, keys = apply_rotary_pos_emb(heads, heads[:, :1], angles.cos(), angles.sin())
        return queries * keys

    x = torch.randn(1, 5, 48)
    trace = capture_trace(compute, x)
    x.copy_(torch.randn(1, 5, 48))

    assert len(trace) == 1 + 1 + 2 + 1
    torch.testing.assert_close(trace.replay(), compute(x))


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

    for compute in (intermediate_used, cubed_norm, norm_of_other_input, partial_rotation):
        x = torch.randn(1, 5, 48)
        trace = capture_trace(compute, x)
        x.copy_(torch.randn(1, 5, 48))
        torch.testing.assert_close(trace.replay(), compute(x))
        assert len(trace) >= 5
