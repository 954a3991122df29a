"""Decode attention's definition, compared with PyTorch's attention, and the number of splits."""

import torch
import torch.nn.functional as F

from pipeline.kernels.decode_attention import AttentionSpec, choose_splits, decode_attention


def tensors(heads: int = 4, kv_heads: int = 2, size: int = 64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, heads, size, generator=generator)
    key, value = (torch.randn(2, kv_heads, 128, size, generator=generator) for _ in range(2))
    return query, key, value


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def test_each_sequence_attends_to_its_keys_as_in_pytorch() -> None:
    query, key, value = tensors()
    spec = AttentionSpec(
        lengths=ints(67, 5),
        pages=torch.stack([ints(3, 1), ints(2, 0)]),
        scaling=0.3,
        sliding_window=4,
    )
    stored = torch.empty(2, 4, 2, 64, 64)
    for pages, states in zip(stored, (key, value), strict=True):
        pages[3], pages[1] = states[0].split(64, dim=1)
        pages[2], pages[0] = states[1].split(64, dim=1)

    out = decode_attention(query, *stored, spec, longest=67)

    for row, (first, end) in enumerate([(63, 67), (1, 5)]):
        expected = F.scaled_dot_product_attention(
            query[row, :, None],
            key[row, :, first:end],
            value[row, :, first:end],
            scale=0.3,
            enable_gqa=True,
        )
        torch.testing.assert_close(out[row], expected[:, 0])


def test_number_of_splits_fills_the_gpu() -> None:
    # 132 multiprocessors run 4.1 x 64 blocks with two blocks each, and 8.3 x 64 with four.
    assert choose_splits(64, 4096, max_active_blocks=132 * 2) == 5
    assert choose_splits(64, 4096, max_active_blocks=132 * 4) == 9
    assert choose_splits(64, 300, max_active_blocks=132 * 4) == 2  # at least 128 keys in each
    assert choose_splits(2048, 4096, max_active_blocks=132 * 4) == 1
