"""Sequences that share a call without padding attend as each does alone."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pipeline.models import varlen
from pipeline.models.attention import Ragged, _OneOrder, pad, unpad

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


class Watched(torch.autograd.Function):
    """Keeps whether an operator without one order only warned on the way back."""

    warns: list[bool]

    @staticmethod
    def forward(ctx: Any, heads: Tensor) -> Tensor:
        del ctx
        return heads.clone()

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> Tensor:
        del ctx
        Watched.warns.append(torch.is_deterministic_algorithms_warn_only_enabled())
        return grad


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = scaled_dot_product_attention(query, key, value, is_causal=True)
    return Watched.apply(out)  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("frozen", [(), (1,), (0, 2)])
def test_gradients_are_those_of_attention_and_only_its_way_back_is_strict(
    frozen: tuple[int, ...],
) -> None:
    drawn = torch.randn(3, 2, 2, 9, 16, generator=torch.Generator().manual_seed(0))
    ours, theirs = (
        [each.clone().requires_grad_(place not in frozen) for place, each in enumerate(drawn)]
        for _ in range(2)
    )
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        Watched.warns = []
        one: Any = _OneOrder.apply(causal, *ours)
        Watched.apply(one).square().sum().backward()
        after = torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(mode=False)

    assert Watched.warns == [True, False]
    assert after
    other = causal(*theirs)
    other.square().sum().backward()
    assert torch.equal(one, other)
    pairs = [(mine.grad, other.grad) for mine, other in zip(ours, theirs, strict=True)]
    assert [place for place, pair in enumerate(pairs) if pair == (None, None)] == list(frozen)
    assert all(torch.equal(a, b) for a, b in pairs if a is not None and b is not None)


SOURCE = torch.tensor([2, 3, 4, 0, 1, 1])
"""Sequences of 2 and 3 rows, the longer first; the last place is padding."""

PLACE = torch.tensor([3, 4, 0, 1, 2])


def test_rows_go_where_they_belong_and_come_back() -> None:
    rows = torch.arange(10.0).view(5, 2)

    padded = pad(rows, SOURCE, PLACE)

    assert padded[:, 0].tolist() == [4.0, 6.0, 8.0, 0.0, 2.0, 2.0]
    assert unpad(padded, PLACE).equal(rows)


def test_gradients_are_those_of_indexed_reads() -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(5, 2, 3), torch.randn(5, 2, 3)

    def gradient(*, indexed: bool) -> torch.Tensor:
        leaf = rows.clone().requires_grad_()
        padded = leaf[SOURCE] if indexed else pad(leaf, SOURCE, PLACE)
        padded = padded * padded.detach().cos()
        back = padded[PLACE] if indexed else unpad(padded, PLACE)
        (back * weight).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    assert gradient(indexed=False).equal(gradient(indexed=True))
