"""Decode attention's definition, against attention of PyTorch and numbers by hand; its refusals."""

import torch
import torch.nn.functional as F

from pipeline.kernels.decode_attention import Scores, choose_splits, decode_attention


def tensors(heads: int = 4, kv_heads: int = 2, size: int = 64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, heads, size, generator=generator)
    key, value = (torch.randn(2, kv_heads, 9, size, generator=generator) for _ in range(2))
    return query, key, value


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def test_each_sequence_attends_to_its_own_keys_as_in_pytorch() -> None:
    query, key, value = tensors()
    scores = Scores(lengths=ints(9, 5), scaling=0.3, sliding_window=4)

    out = decode_attention(query, key, value, scores, longest=9)

    for row, (first, end) in enumerate([(5, 9), (1, 5)]):
        expected = F.scaled_dot_product_attention(
            query[row, :, None],
            key[row, :, first:end],
            value[row, :, first:end],
            scale=0.3,
            enable_gqa=True,
        )
        torch.testing.assert_close(out[row], expected[:, 0])


def test_keys_are_split_until_the_blocks_that_registers_allow_fill_the_gpu() -> None:
    # 132 multiprocessors with two blocks each run 4.1 parts of 64 blocks, with four 8.3.
    assert choose_splits(64, 4096, at_once=132 * 2) == 5
    assert choose_splits(64, 4096, at_once=132 * 4) == 9
    assert choose_splits(64, 300, at_once=132 * 4) == 2  # of at least 128 keys
    assert choose_splits(2048, 4096, at_once=132 * 4) == 1
