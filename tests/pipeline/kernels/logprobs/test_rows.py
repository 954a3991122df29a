"""Log-probabilities that are computed a few rows at a time match the definition bitwise."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.kernels.logprobs import compute_logprobs, row_logprobs

K, V = 37, 1500


def make_inputs(
    dtype: torch.dtype, count: int = K, vocab_size: int = V
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, targets and the weights of the log-probabilities."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(count, vocab_size, generator=generator)
    targets = torch.randint(vocab_size, (count,), generator=generator)
    return logits.to(dtype), targets, torch.randn(count, generator=generator)


def run(compute: Any, logits: Tensor, targets: Tensor, weights: Tensor, **settings: Any) -> Any:
    leaf = logits.clone().requires_grad_()
    logprobs, entropies = compute(leaf, targets, **settings)
    (logprobs * weights).sum().backward()
    return logprobs.detach(), entropies, leaf.grad


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_row_logprobs_match_the_definition_bitwise(
    dtype: torch.dtype, temperature: float, rows: int
) -> None:
    inputs = make_inputs(dtype)
    settings = {"temperature": temperature, "entropy": True}

    by_rows = run(row_logprobs, *inputs, **settings, chunk_size=rows * V + 1)
    plain = run(compute_logprobs, *inputs, **settings, entropy_grad=False)

    for actual, expected in zip(by_rows, plain, strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    assert not by_rows[1].requires_grad


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("count", "vocab_size"), [(70, 50_000), (21, 50_000), (7, 150_000), (1, 50_000)]
)
def test_large_vocabularies_match_bitwise_with_any_threads(
    count: int, vocab_size: int, threads: int
) -> None:
    """PyTorch splits a single sum of that size among threads; a chunk may be less than a row."""
    inputs = make_inputs(torch.bfloat16, count, vocab_size)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        by_rows = run(row_logprobs, *inputs, entropy=True)
        plain = run(compute_logprobs, *inputs, temperature=1.0, entropy=True, entropy_grad=False)
    finally:
        torch.set_num_threads(before)

    for actual, expected in zip(by_rows, plain, strict=True):
        assert torch.equal(actual, expected)
