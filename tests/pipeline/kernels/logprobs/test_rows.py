"""Log-probabilities a few rows at a time have the definition's bits, in less memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.kernels.logprobs import logprobs_of, row_logprobs

K, V = 37, 1500


def given(dtype: torch.dtype, count: int = K, words: int = V) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets and how much each log-probability weighs."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(count, words, generator=generator)
    targets = torch.randint(words, (count,), generator=generator)
    return logits.to(dtype), targets, torch.randn(count, generator=generator)


def learned(compute: Any, logits: Tensor, targets: Tensor, weights: Tensor, **settings: Any) -> Any:
    leaf = logits.clone().requires_grad_()
    logprobs, entropies = compute(leaf, targets, **settings)
    (logprobs * weights).sum().backward()
    return logprobs.detach(), entropies, leaf.grad


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_bit_differs_from_the_definition(
    dtype: torch.dtype, temperature: float, rows: int
) -> None:
    inputs = given(dtype)
    settings = {"temperature": temperature, "entropy": True}

    ours = learned(row_logprobs, *inputs, **settings, at_once=rows * V + 1)
    plain = learned(logprobs_of, *inputs, **settings, entropy_learns=False)

    for here, there in zip(ours, plain, strict=True):
        assert here.dtype == there.dtype
        assert torch.equal(here, there)
    assert not ours[1].requires_grad


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("count", "words"), [(70, 50_000), (21, 50_000), (7, 150_000), (1, 50_000)]
)
def test_real_vocabularies_keep_their_bits_on_any_threads(
    count: int, words: int, threads: int
) -> None:
    """PyTorch shares a single sum of that many among threads, and a turn may have no single row."""
    inputs = given(torch.bfloat16, count, words)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        ours = learned(row_logprobs, *inputs, entropy=True)
        plain = learned(logprobs_of, *inputs, temperature=1.0, entropy=True, entropy_learns=False)
    finally:
        torch.set_num_threads(before)

    for here, there in zip(ours, plain, strict=True):
        assert torch.equal(here, there)
