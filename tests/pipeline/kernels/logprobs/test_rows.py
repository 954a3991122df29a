"""Log-probabilities a few rows at a time have the definition's bits, in less memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.memory import live_bytes, peak_bytes_of
from pipeline.kernels.logprobs import definition
from pipeline.kernels.logprobs.dispatch import row_logprobs

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
    plain = learned(definition.logprobs_of, *inputs, **settings, entropy_learns=False)

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
        plain = learned(
            definition.logprobs_of, *inputs, temperature=1.0, entropy=True, entropy_learns=False
        )
    finally:
        torch.set_num_threads(before)

    for here, there in zip(ours, plain, strict=True):
        assert torch.equal(here, there)


def test_no_target_is_nothing_to_learn() -> None:
    logprobs, entropies, grad = learned(
        row_logprobs, *given(torch.float32, count=0), temperature=1.0, entropy=True
    )

    assert logprobs.shape == entropies.shape == (0,)
    assert grad.shape == (0, V)


def test_beside_the_logits_there_is_their_gradient_and_one_turn() -> None:
    """The plain way has logits, log-probabilities and two gradients of them in fp32."""
    logits, targets, weights = given(torch.bfloat16, count=256, words=8192)
    leaf, turn = logits.requires_grad_(), 16 * 8192

    def learn() -> None:
        leaf.grad = None
        logprobs, _ = row_logprobs(leaf, targets, entropy=True, at_once=turn)
        (logprobs * weights).sum().backward()

    learn()
    leaf.grad = None
    outputs = 8 * len(targets) * 4
    before = live_bytes()  # of other tests, too
    assert peak_bytes_of(learn) - before <= leaf.nbytes + 3 * turn * 4 + outputs


@pytest.mark.parametrize("compute", [row_logprobs, definition.logprobs_of])
def test_the_target_that_losses_pass_over_is_no_word_here(compute: Any) -> None:
    settings = {"temperature": 1.0, "entropy": False}
    with pytest.raises(IndexError, match="-100 is out of bounds"):
        compute(torch.zeros(2, 9), torch.tensor([1, -100]), **settings)
