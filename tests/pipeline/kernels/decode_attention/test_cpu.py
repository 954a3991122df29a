"""Decode attention on the CPU, compared with float64 and PyTorch."""

import pytest
import torch
from torch import Tensor

from pipeline.kernels.build import Library
from pipeline.kernels.choice import KERNELS_VARIABLE
from pipeline.kernels.decode_attention import (
    MAX_HEAD_SIZE,
    AttentionSpec,
    decode_attention,
    find_kernel,
    reference_attention,
)
from tests.pipeline.kernels.decode_attention.cases import Case, make_inputs
from tests.pipeline.kernels.numbers import random, relative_error

F32, BF16 = torch.float32, torch.bfloat16


def make_tensors(case: Case) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
    inputs = make_inputs(case, torch.device("cpu"))
    return inputs.query, inputs.key, inputs.value, inputs.spec


@pytest.mark.parametrize("size", [2, 16, 48, 80, 128, 194, 256])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_attention_is_at_least_as_accurate_as_pytorch(dtype: torch.dtype, size: int) -> None:
    query, key, value, spec = make_tensors(Case(dtype, size, 4, 2, (1, 40, 700)))
    assert isinstance(find_kernel(query, key, value), Library)

    out = decode_attention(query, key, value, spec, longest=700)

    exact = reference_attention(query.double(), key.double(), value.double(), spec)
    plain = reference_attention(query, key, value, spec)
    allowed = max(1.1 * relative_error(plain, exact), 4 * torch.finfo(dtype).eps)
    assert relative_error(out, exact) < allowed


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_windows_and_shared_heads_match_the_definition(kv_heads: int) -> None:
    query, key, value, spec = make_tensors(Case(F32, 64, 6, kv_heads, (3, 30, 600), window=30))

    out = decode_attention(query, key, value, spec, longest=600)

    expected = reference_attention(query, key, value, spec)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_unsupported_tensors_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, _ = make_tensors(Case(F32, 64, 4, 2, (9, 5)))

    for unsupported in (
        (query, key.bfloat16(), value),
        (query.double(), key.double(), value.double()),
        (query, key.transpose(2, 3).contiguous().transpose(2, 3), value),
        (query[..., :63].bfloat16(), key[..., :63].bfloat16().contiguous(), value.bfloat16()),
        (random(2, 4, MAX_HEAD_SIZE + 1), *[random(2, 2, 9, MAX_HEAD_SIZE + 1)] * 2),
        (query.clone().requires_grad_(), key, value),
    ):
        assert find_kernel(*unsupported) is None
    monkeypatch.setenv(KERNELS_VARIABLE, "off")
    assert find_kernel(query, key, value) is None
