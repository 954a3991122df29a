"""Decode attention's definition, against attention of PyTorch and numbers by hand; its refusals."""

import torch
import torch.nn.functional as F

from pipeline.kernels.decode_attention import Scores, decode_attention


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
