"""Sequences that share a call attend as each does alone."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.models.forward import attention
from pipeline.models.forward.attention import Ragged, unpad

LENGTHS = (7, 1, 40, 3)


def heads(dtype: torch.dtype, device: torch.device, *, shared_by: int, size: int = 16) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    counts = (2 * shared_by, 2, 2)
    drawn = [torch.randn(1, n, sum(LENGTHS), size, generator=generator) for n in counts]
    return [each.to(device, dtype).requires_grad_() for each in drawn]


def as_documented(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Reference of `varlen_attn`, whose kernel needs a GPU: rows of (tokens, heads, size)."""
    starts, key_starts, longest, longest_keys = rest
    scale, (left, right) = options["scale"], options["window_size"]
    assert starts.dtype == torch.int32
    lengths, key_lengths = starts.diff().tolist(), key_starts.diff().tolist()
    assert (longest, longest_keys) == (max(lengths), max(key_lengths))
    assert options.get("enable_gqa", False) == (query.shape[1] > key.shape[1])
    assert options.get("num_splits", 1) == 1
    assert right == 0
    rows: list[Tensor] = []
    for begin, key_begin, length, num_keys in zip(
        starts.tolist(), key_starts.tolist(), lengths, key_lengths, strict=False
    ):
        q = query[begin : begin + length].double()
        k, v = (each[key_begin : key_begin + num_keys].double() for each in (key, value))
        k, v = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * (scale or query.shape[2] ** -0.5)
        keys = torch.arange(num_keys)
        behind = keys[num_keys - length :, None] - keys[None, :]
        hidden = (behind < 0) | ((behind > left) if left >= 0 else behind.new_zeros(()).bool())
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        rows.append(torch.einsum("hij,jhd->ihd", weights, v).to(query.dtype))
    return torch.cat(rows)


OPTIONS = ("scale", "window_size", "enable_gqa", "num_splits")


@pytest.mark.parametrize("options_of_torch", [OPTIONS[:2], OPTIONS])  # 2.11 and later
@pytest.mark.parametrize("sliding_window", [None, 5])
@pytest.mark.parametrize("shared_by", [1, 3])
@pytest.mark.parametrize("continues", [(), (None, None, 0, 0)])
def test_a_call_for_all_sequences_is_a_call_for_each(
    shared_by: int,
    sliding_window: int | None,
    continues: tuple[int | None, ...],
    options_of_torch: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = heads(torch.float32, torch.device("cpu"), shared_by=shared_by)
    options: Any = {"scaling": 0.3, "sliding_window": sliding_window}
    more: Any = {"device": torch.device("cpu"), "continues": continues}
    alone = Ragged(LENGTHS, **more).attend(*given, **options)

    monkeypatch.setattr(attention, "varlen_runs", lambda *_, **__: True)
    monkeypatch.setattr(attention, "varlen_attn", as_documented)
    monkeypatch.setattr(attention, "VARLEN_OPTIONS", options_of_torch)
    together = Ragged(LENGTHS, **more).attend(*given, **options)
    switched_off = Ragged(LENGTHS, **more, kernels="off").attend(*given, **options)

    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(switched_off, alone, rtol=1e-5, atol=1e-6)


SOURCE = torch.tensor([2, 3, 4, 0, 1, 1])
"""Sequences of 2 and 3 rows, the longer first; the last place is padding."""

PLACE = torch.tensor([3, 4, 0, 1, 2])


def test_gradients_are_those_of_indexed_reads() -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(5, 2, 3), torch.randn(5, 2, 3)

    def gradient(*, indexed: bool) -> torch.Tensor:
        leaf = rows.clone().requires_grad_()
        padded = leaf[SOURCE]
        padded = padded * padded.detach().cos()
        back = padded[PLACE] if indexed else unpad(padded, PLACE)
        (back * weight).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    assert gradient(indexed=False).equal(gradient(indexed=True))
