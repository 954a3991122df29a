"""Decode attention on the CPU, against float64 and PyTorch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.kernels.build import Library
from pipeline.kernels.choice import SWITCH
from pipeline.kernels.decode_attention import (
    MOST_SIZE,
    Scores,
    decode_attention,
    kernel_for,
    reference_attention,
    sequence_attention,
)
from tests.pipeline.kernels.numbers import random, relative_error

F32, BF16 = torch.float32, torch.bfloat16


def tensors(
    lengths: tuple[int, ...], size: int, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = F32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, keys, values and lengths; unseen keys and values are NaN."""
    batch, width = len(lengths), max(lengths) + 3
    query = random(heads, batch, size, seed=1).transpose(0, 1)  # strided, as models have it
    key, value = (random(batch, kv_heads, width, size, seed=seed) for seed in (2, 3))
    for row, length in enumerate(lengths):
        key[row, :, length:] = value[row, :, length:] = torch.nan
    return query.to(dtype), key.to(dtype), value.to(dtype), torch.tensor(lengths).int()


@pytest.mark.parametrize("size", [2, 16, 48, 80, 128, 194, 256])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_attention_is_at_least_as_accurate_as_pytorch(dtype: torch.dtype, size: int) -> None:
    query, key, value, lengths = tensors((1, 40, 700), size, dtype=dtype)
    scores = Scores(lengths=lengths, scaling=size**-0.5)
    assert isinstance(kernel_for(query, key, value), Library)

    out = decode_attention(query, key, value, scores, longest=700)

    exact = reference_attention(query.double(), key.double(), value.double(), scores)
    plain = reference_attention(query, key, value, scores)
    allowed = max(1.1 * relative_error(plain, exact), 4 * torch.finfo(dtype).eps)
    assert relative_error(out, exact) < allowed


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_windows_and_shared_heads(kv_heads: int) -> None:
    query, key, value, lengths = tensors((3, 30, 600), 64, heads=6, kv_heads=kv_heads)
    key[2, :, :570] = value[2, :, :570] = torch.nan
    scores = Scores(lengths=lengths, scaling=0.1, sliding_window=30)

    out = decode_attention(query, key, value, scores, longest=600)

    expected = reference_attention(query, key, value, scores)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_tokens_of_one_sequence_attend_as_each_alone() -> None:
    query, key, value, _ = tensors((530,), 48)
    query = random(20, 4, 48)
    out = torch.empty_like(query)

    settings: Any = {"scaling": 0.2, "sliding_window": 70}
    assert sequence_attention(query, key, value, first=505, out=out, **settings)

    for row in range(20):
        scores = Scores(lengths=torch.tensor([506 + row]).int(), **settings)
        alone = reference_attention(query[row : row + 1], key, value, scores)
        torch.testing.assert_close(out[row : row + 1], alone, atol=1e-5, rtol=1e-5)


def test_unsupported_tensors_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, _ = tensors((9, 5), 64)

    for other in (
        (query, key.bfloat16(), value),
        (query.double(), key.double(), value.double()),
        (query, key.transpose(2, 3).contiguous().transpose(2, 3), value),
        (query[..., :63].bfloat16(), key[..., :63].bfloat16().contiguous(), value.bfloat16()),
        (random(2, 4, MOST_SIZE + 1), *[random(2, 2, 9, MOST_SIZE + 1)] * 2),
        (query.clone().requires_grad_(), key, value),
    ):
        assert kernel_for(*other) is None
    monkeypatch.setenv(SWITCH, "off")
    assert kernel_for(query, key, value) is None
