"""Attention over several sequences in one call matches separate calls."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.models.forward import attention
from pipeline.models.forward.attention import Ragged, attend_causally, attend_without_grad, unpad

LENGTHS = (7, 1, 40, 3)


def heads(dtype: torch.dtype, device: torch.device, *, shared_by: int, size: int = 16) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    counts = (2 * shared_by, 2, 2)
    states = [torch.randn(1, n, sum(LENGTHS), size, generator=generator) for n in counts]
    return [state.to(device, dtype).requires_grad_() for state in states]


def reference(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Compute `varlen_attn`, whose kernel needs a GPU, for rows of (tokens, heads, size)."""
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
        k, v = (x[key_begin : key_begin + num_keys].double() for x in (key, value))
        k, v = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * (scale or query.shape[2] ** -0.5)
        keys = torch.arange(num_keys)
        distance = keys[num_keys - length :, None] - keys[None, :]
        masked = distance < 0 if left < 0 else (distance < 0) | (distance > left)
        weights = scores.masked_fill(masked, -torch.inf).softmax(-1)
        rows.append(torch.einsum("hij,jhd->ihd", weights, v).to(query.dtype))
    return torch.cat(rows)


OPTIONS = ("scale", "window_size", "enable_gqa", "num_splits")


@pytest.mark.parametrize("torch_options", [OPTIONS[:2], OPTIONS])  # 2.11 and later
@pytest.mark.parametrize("sliding_window", [None, 5])
@pytest.mark.parametrize("shared_by", [1, 3])
@pytest.mark.parametrize("continues", [(), (None, None, 0, 0)])
def test_one_call_for_all_sequences_matches_separate_calls(
    shared_by: int,
    sliding_window: int | None,
    continues: tuple[int | None, ...],
    torch_options: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = heads(torch.float32, torch.device("cpu"), shared_by=shared_by)
    options: Any = {"scaling": 0.3, "sliding_window": sliding_window}
    settings: Any = {"device": torch.device("cpu"), "continues": continues}
    layout = Ragged(LENGTHS, **settings)
    layout.attend(*states, scaling=0.3, sliding_window=2)  # as another layer with this layout
    separate = layout.attend(*states, **options)

    monkeypatch.setattr(attention, "supports_varlen", lambda *_, **__: True)
    monkeypatch.setattr(attention, "varlen_attn", reference)
    monkeypatch.setattr(attention, "VARLEN_OPTIONS", torch_options)
    joint = Ragged(LENGTHS, **settings).attend(*states, **options)
    without_kernels = Ragged(LENGTHS, **settings, kernels="off").attend(*states, **options)

    assert separate.is_contiguous()  # jetmoe's code calls `view` on it
    torch.testing.assert_close(joint, separate, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(without_kernels, separate, rtol=1e-5, atol=1e-6)


SOURCE, POSITIONS = torch.tensor([2, 3, 4, 0, 1, 1]), torch.tensor([3, 4, 0, 1, 2])
"""Sequences of 2 and 3 rows, the longer first; the last position is padding."""


def test_gradients_of_unpad_match_those_of_indexing() -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(5, 2, 3), torch.randn(5, 2, 3)

    def gradient(*, indexed: bool) -> torch.Tensor:
        leaf = rows.clone().requires_grad_()
        padded = leaf[SOURCE]
        padded = padded * padded.detach().cos()
        restored = padded[POSITIONS] if indexed else unpad(padded, POSITIONS)
        (restored * weight).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    assert gradient(indexed=False).equal(gradient(indexed=True))


def test_attention_without_grad_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    shapes = ((6, 70), (2, 200), (2, 200))
    options: Any = {"scaling": 0.3, "sliding_window": None}
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        heads = [torch.randn(1, *shape, 16).to(dtype) for shape in shapes]
        expected = attend_causally(*(states.double() for states in heads), **options)
        with monkeypatch.context() as patch:
            patch.setattr(attention, "causal_mask", None)
            actual = attend_without_grad(*heads, **options)
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)
