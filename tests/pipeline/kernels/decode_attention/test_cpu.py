"""Decode attention on the CPU: the bits of a causal pass over a sequence, or float64's."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pipeline.kernels.choice import SWITCH
from pipeline.kernels.decode_attention import cpu, definition
from pipeline.kernels.decode_attention.definition import Scores
from pipeline.kernels.decode_attention.dispatch import decode_attention, kernel_for
from pipeline.kernels.decode_attention.pieces import BLOCK, PIECES, piece, whole_pieces
from pipeline.kernels.toolchain.cpp import Built

DTYPES = (torch.float32, torch.bfloat16)


def cache(dtype: torch.dtype, length: int, heads: int = 2, size: int = 48) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(length)
    shape = (1, heads, length, size)
    key, value = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return key, value


def asked(dtype: torch.dtype, length: int, heads: int = 4, size: int = 48) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (2 * torch.randn(1, heads, length, size, generator=generator)).to(dtype)


def after(length: int, *, window: int | None = None, size: int = 48) -> Scores:
    """What the token at the end of that many sees."""
    lengths = torch.tensor([length], dtype=torch.int32)
    return Scores(lengths=lengths, scaling=size**-0.5, sliding_window=window)


def require_kernel(dtype: torch.dtype, size: int) -> None:
    found = cpu.kernel(dtype, size)
    if not isinstance(found, Built):
        pytest.skip(found)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_of_one_sequence_have_together_the_bits_that_each_has_alone(
    dtype: torch.dtype, window: int | None
) -> None:
    for first, count in ((0, 3), (505, 20), (1030, 1)):
        built = cpu.build_for(dtype, cpu.PIECES_BF16[0])
        key, value = cache(dtype, first + count + 9)
        query = asked(dtype, count)[0].transpose(0, 1)  # of strides of its own
        lengths = torch.arange(first + 1, first + 1 + count, dtype=torch.int32)
        settings: Any = {"scaling": 0.2, "sliding_window": window, "built": built}
        together = query.new_empty(query.shape)

        cpu.sequence_attention(query, key, value, lengths, out=together, **settings)

        for row in range(count):
            one = slice(row, row + 1)
            alone = cpu.decode_attention(query[one], key, value, lengths[one], **settings)
            assert torch.equal(together[one], alone)


@pytest.mark.parametrize("size", [2, 16, 48, 80, 128, 194, 218, 254, 256])
@pytest.mark.parametrize("pieces", cpu.PIECES_BF16)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_that_of_float64_for_any_head(
    dtype: torch.dtype, pieces: int, size: int
) -> None:
    """Whether or not PyTorch on this machine adds up in such pieces."""
    built = cpu.build_for(dtype, pieces)
    for length in (1, 40, 700):
        query, (key, value) = asked(dtype, length, size=size), cache(dtype, length, size=size)
        row, scores = query[:, :, -1].contiguous(), after(length, size=size)

        out = cpu.decode_attention(
            row,
            key,
            value,
            scores.lengths,
            scaling=scores.scaling,
            sliding_window=None,
            built=built,
        )

        exact = definition.decode_attention(row.double(), key.double(), value.double(), scores)
        # In bf16 a result is rounded, and weights are before.
        rtol, atol = (0, 4e-6) if dtype == torch.float32 else (2**-8, 4e-3)
        torch.testing.assert_close(out.double(), exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize("size", [16, 24, 48, 64, 80, 128, 254, 256])
@pytest.mark.parametrize(
    ("dtype", "length"),
    [
        *((torch.float32, whole_pieces(length)) for length in (192, 300, 704, 1024)),
        *((torch.bfloat16, length) for length in (192, 384)),
        pytest.param(
            *(torch.bfloat16, BLOCK),
            marks=pytest.mark.skipif(
                piece() != PIECES[0], reason="a whole block is added up in halves here"
            ),
        ),
    ],
)
def test_each_token_has_the_bits_of_a_pass_over_the_whole_sequence(
    dtype: torch.dtype, length: int, size: int
) -> None:
    require_kernel(dtype, size)
    query, (key, value) = asked(dtype, length, size=size), cache(dtype, length, size=size)
    several = [each.repeat_interleave(2, dim=1) for each in (key, value)]
    whole = F.scaled_dot_product_attention(query, *several, is_causal=True)

    for place in (0, 1, 15, 16, 32, 150, *range(191, length, 37), length - 1):
        row = query[:, :, place].contiguous()
        out = decode_attention(row, key, value, after(place + 1, size=size), longest=place + 1)

        assert torch.equal(out, whole[:, :, place]), place


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_window_hides_what_lies_before_it(dtype: torch.dtype) -> None:
    require_kernel(dtype, 48)
    query, (key, value) = asked(dtype, 160), cache(dtype, 160)
    several = [each.repeat_interleave(2, dim=1) for each in (key, value)]
    distance = torch.arange(160)[:, None] - torch.arange(160)[None, :]
    seen = (distance >= 0) & (distance < 21)
    whole = F.scaled_dot_product_attention(query, *several, attn_mask=seen)
    key[:, :, :100] = value[:, :, :100] = torch.nan

    out = decode_attention(
        query[:, :, 150].contiguous(), key, value, after(151, window=21), longest=151
    )

    assert torch.equal(out, whole[:, :, 150])


@pytest.mark.parametrize("length", [193, 300, 512, 513, 700, 1100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sequences_are_right_to_rounding(dtype: torch.dtype, length: int) -> None:
    require_kernel(dtype, 48)
    query, (key, value) = asked(dtype, length)[:, :, -1].contiguous(), cache(dtype, length)
    for window in (None, 250):
        scores = after(length, window=window)

        out = decode_attention(query, key, value, scores, longest=length)

        expected = definition.decode_attention(query.double(), key.double(), value.double(), scores)
        torch.testing.assert_close(
            out.double(), expected, rtol=0, atol=2e-6 if dtype == torch.float32 else 4e-3
        )


@pytest.mark.parametrize("window", [None, 20, 10])
def test_lengths_beyond_the_cache_see_what_it_holds(window: int | None) -> None:
    require_kernel(torch.float32, 48)
    key, value = (torch.cat(cache(torch.float32, 32)[:1] * 2) for _ in range(2))
    query = torch.randn(2, 4, 48)
    for length in (33, 40, 1000, 2**31 - 1):
        lengths = torch.tensor([length, 20], dtype=torch.int32)
        scores = Scores(lengths=lengths, scaling=0.1, sliding_window=window)

        out = decode_attention(query, key, value, scores, longest=32)

        expected = definition.decode_attention(query, key, value, scores)
        torch.testing.assert_close(out, expected)


def test_sequences_of_many_lengths_do_not_see_each_other() -> None:
    require_kernel(torch.float32, 48)
    lengths = [7, 0, 33, 64]
    key, value = (torch.full((4, 2, 64, 48), torch.nan) for _ in range(2))
    for slot, length in enumerate(lengths):
        key[slot, :, :length], value[slot, :, :length] = torch.randn(2, 2, length, 48)
    query = torch.randn(4, 4, 48)
    scores = Scores(lengths=torch.tensor(lengths, dtype=torch.int32), scaling=0.1)

    together = decode_attention(query, key, value, scores, longest=64)

    assert together[1].eq(0).all()
    for slot, length in enumerate(lengths):
        alone = Scores(lengths=scores.lengths[slot : slot + 1], scaling=0.1)
        part = slice(slot, slot + 1)
        out = decode_attention(query[part], key[part], value[part], alone, longest=length)
        assert torch.equal(together[part], out)


def test_a_query_may_lie_in_another_order_and_the_result_where_it_is_wanted() -> None:
    require_kernel(torch.float32, 48)
    query, (key, value) = torch.randn(4, 1, 48).transpose(0, 1), cache(torch.float32, 32)
    out = torch.full((1, 4, 48), torch.nan)

    returned = decode_attention(query, key, value, after(20), longest=20, out=out)

    assert returned is out
    assert torch.equal(out, decode_attention(query.contiguous(), key, value, after(20), longest=20))


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        (torch.zeros(1, 4, 48).half(), *(each.half() for each in cache(torch.float32, 8))),
        (torch.zeros(1, 4, 48), *cache(torch.bfloat16, 8)),
        (torch.zeros(1, 4, 48), cache(torch.float32, 8)[0], cache(torch.float32, 8, size=32)[0]),
        (torch.zeros(1, 4, 288), *cache(torch.float32, 8, size=288)),
        (torch.zeros(1, 4, 15).bfloat16(), *cache(torch.bfloat16, 8, size=15)),
        (torch.zeros(1, 4, 48), *(each.mT.contiguous().mT for each in cache(torch.float32, 8))),
        (torch.zeros(1, 4, 96)[:, :, ::2], *cache(torch.float32, 8)),
    ],
)
def test_what_it_does_not_take_is_left_to_pytorch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    assert kernel_for(query, key, value) is None


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    require_kernel(torch.float32, 48)
    query, (key, value) = torch.zeros(1, 4, 48), cache(torch.float32, 8)
    assert kernel_for(query, key, value) is not None

    monkeypatch.setenv(SWITCH, "off")

    assert kernel_for(query, key, value) is None
