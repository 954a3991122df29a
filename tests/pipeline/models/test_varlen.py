"""Sequences that share a call without padding attend as each does alone."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.models import varlen
from pipeline.models.attention import Ragged

LENGTHS = (7, 1, 40, 3)


def heads(dtype: torch.dtype, device: torch.device, *, shared_by: int, size: int = 16) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    counts = (2 * shared_by, 2, 2)
    drawn = [torch.randn(1, n, sum(LENGTHS), size, generator=generator) for n in counts]
    return [each.to(device, dtype).requires_grad_() for each in drawn]


def as_documented(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
    """What torch says of `varlen_attn`, whose kernel needs a GPU: rows of (tokens, heads, size)."""
    starts, key_starts, longest, longest_keys = rest
    scale, (left, right) = options["scale"], options["window_size"]
    assert starts.dtype == torch.int32
    assert starts.tolist() == key_starts.tolist()
    lengths = starts.diff().tolist()
    assert longest == longest_keys == max(lengths)
    assert options.get("enable_gqa", False) == (query.shape[1] > key.shape[1])
    assert options.get("num_splits", 1) == 1
    assert right == 0
    rows: list[Tensor] = []
    for begin, length in zip(starts.tolist(), lengths, strict=False):
        q, k, v = (each[begin : begin + length].double() for each in (query, key, value))
        k, v = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * (scale or query.shape[2] ** -0.5)
        step = torch.arange(length)
        behind = step[:, None] - step[None, :]
        hidden = (behind < 0) | ((behind > left) if left >= 0 else behind.new_zeros(()).bool())
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        rows.append(torch.einsum("hij,jhd->ihd", weights, v).to(query.dtype))
    return torch.cat(rows)


OPTIONS = ("scale", "window_size", "enable_gqa", "num_splits")


@pytest.mark.parametrize("options_of_torch", [OPTIONS[:2], OPTIONS])  # 2.11 and later
@pytest.mark.parametrize("sliding_window", [None, 5])
@pytest.mark.parametrize("shared_by", [1, 3])
def test_the_call_without_padding_is_that_of_the_padded_ones(
    shared_by: int,
    sliding_window: int | None,
    options_of_torch: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = heads(torch.float32, torch.device("cpu"), shared_by=shared_by)
    options: Any = {"scaling": 0.3, "sliding_window": sliding_window}
    padded = Ragged(LENGTHS, torch.device("cpu")).attend(*given, **options)

    monkeypatch.setattr(varlen, "takes", lambda *_, **__: True)
    monkeypatch.setattr(varlen, "_varlen_attn", lambda: (as_documented, options_of_torch))
    together = Ragged(LENGTHS, torch.device("cpu")).attend(*given, **options)
    switched_off = Ragged(LENGTHS, torch.device("cpu"), kernels="off").attend(*given, **options)

    torch.testing.assert_close(together, padded, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(switched_off, padded, rtol=1e-5, atol=1e-6)


def test_heads_that_it_can_not_take_are_padded() -> None:
    on_cpu = heads(torch.bfloat16, torch.device("cpu"), shared_by=1)

    assert not varlen.takes(*on_cpu, dropout=0.0)
    assert varlen.bounds_of(LENGTHS).tolist() == [0, 7, 8, 48, 51]


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_what_finds_it_first_may_want_no_gradients(
    without_gradients: Callable[[], AbstractContextManager[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "_varlen_attn", lambda: (as_documented, OPTIONS))
    varlen._works.cache_clear()

    with without_gradients():
        works = varlen._works(torch.device("cpu"), torch.bfloat16, 16, 2)

    varlen._works.cache_clear()
    assert works


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shared_by", "size"), [(1, 64), (4, 128), (2, 80)])
def test_on_a_gpu_outputs_and_gradients_are_near_those_of_the_padded_calls(
    dtype: torch.dtype, shared_by: int, size: int
) -> None:
    device = torch.device("cuda")

    def run(kernels: Any) -> Sequence[Tensor]:
        given = heads(dtype, device, shared_by=shared_by, size=size)
        out = Ragged(LENGTHS, device, kernels=kernels).attend(
            *given, scaling=None, sliding_window=None
        )
        out.float().square().sum().backward()
        return [out, *(each.grad for each in given)]

    assert varlen.takes(*heads(dtype, device, shared_by=shared_by, size=size), dropout=0.0)
    for ours, theirs in zip(run("auto"), run("off"), strict=True):
        # By the norm: an element of a gradient is a sum whose terms are rounded to 16 bits.
        assert (ours.float() - theirs.float()).norm() <= 2e-2 * theirs.float().norm()
    again = zip(run("auto"), run("auto"), strict=True)
    assert torch.equal(*next(again))  # the forward pass; the backward one adds in any order
