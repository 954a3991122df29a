"""Log-probabilities a few rows at a time have the definition's bits, in less memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.memory import peak_bytes_of
from pipeline.engine.graph import parameter_uses
from pipeline.kernels import reference
from pipeline.kernels.row_logprobs import row_logprobs

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


@pytest.mark.parametrize("rows", [1, 5, 36, 37, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_bit_differs_from_the_definition(
    dtype: torch.dtype, temperature: float, rows: int
) -> None:
    inputs = given(dtype)
    settings = {"temperature": temperature, "entropy": True}

    ours = learned(row_logprobs, *inputs, **settings, at_once=rows * V)
    plain = learned(reference.logprobs_of, *inputs, **settings, entropy_learns=False)

    for here, there in zip(ours, plain, strict=True):
        assert here.dtype == there.dtype
        assert torch.equal(here, there)
    assert not ours[1].requires_grad


def test_real_vocabularies_take_several_turns_and_keep_their_bits() -> None:
    inputs = given(torch.bfloat16, count=70, words=50_000)

    ours = learned(row_logprobs, *inputs)
    plain = learned(reference.logprobs_of, *inputs, temperature=1.0, entropy=False)

    assert ours[1] is None
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[2], plain[2])


def test_no_target_is_nothing_to_learn() -> None:
    logprobs, entropies, grad = learned(
        row_logprobs, *given(torch.float32, count=0), temperature=1.0, entropy=True
    )

    assert logprobs.shape == entropies.shape == (0,)
    assert grad.shape == (0, V)


def test_it_goes_back_to_its_logits_alone() -> None:
    head = torch.nn.Linear(8, V)
    logprobs, _ = row_logprobs(head(torch.randn(K, 8)), torch.zeros(K, dtype=torch.long))

    assert parameter_uses(logprobs.sum()) == {head.weight: 1, head.bias: 1}


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
    before = leaf.nbytes + targets.nbytes + weights.nbytes
    assert peak_bytes_of(learn) - before <= leaf.nbytes + 3 * turn * 4 + outputs
