"""Log-probabilities by tiles against float64, in numbers and in memory."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.memory import measure_peak_bytes
from pipeline.kernels.logprobs import TILE, VOCABULARY_TILE, linear_logprobs, logprobs_of

K, D, V = 70, 24, 150
SMALL = 16 * V
"""Tiles of 16 targets, or of 34 words."""

Inputs = dict[str, Tensor]


def plainly(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, **settings: Any
) -> tuple[Tensor, Tensor | None]:
    return logprobs_of(F.linear(hidden, weight, bias), targets, **settings)


def inputs(dtype: torch.dtype, *, bias: bool, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"hidden": (K, D), "weight": (V, D)} | ({"bias": (V,)} if bias else {})
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in tensors.items()}


def targets() -> Tensor:
    drawn = torch.randint(0, V, (K,), generator=torch.Generator().manual_seed(1))
    return drawn.index_fill(0, torch.tensor([0]), 0).index_fill(0, torch.tensor([1]), V - 1)


def learned(
    compute: Callable[..., tuple[Tensor, Tensor | None]],
    given: Inputs,
    weights: Tensor,
    of_entropy: Tensor | None = None,
    **settings: Any,
) -> Inputs:
    """Log-probabilities, entropies and the gradients of a weighted sum of them."""
    leaves = {name: each.detach().clone() for name, each in given.items()}
    for name, leaf in leaves.items():
        leaf.requires_grad_(given[name].requires_grad)
    arguments = [leaves["hidden"], leaves["weight"], leaves.get("bias"), targets()]
    logprobs, entropies = compute(*arguments, entropy=of_entropy is not None, **settings)
    loss = (logprobs * weights).sum()
    said = {"logprobs": logprobs.detach()}
    if of_entropy is not None:
        assert entropies is not None
        loss = loss + (entropies * of_entropy).sum()
        said["entropies"] = entropies.detach()
    loss.backward()
    return said | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def exactly(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, **settings: Any
) -> tuple[Tensor, Tensor | None]:
    """The formula in float64."""
    logits = hidden.double() @ weight.double().T
    logits = (logits if bias is None else logits + bias.double()) / settings["temperature"]
    logprobs = logits - logits.exp().sum(dim=1, keepdim=True).log()
    entropies = -(logprobs.exp() * logprobs).sum(dim=1) if settings["entropy"] else None
    return logprobs[torch.arange(len(targets)), targets], entropies


def errors(got: Inputs, expected: Inputs) -> dict[str, float]:
    """Largest error of each tensor, of its largest element."""
    assert got.keys() == expected.keys()
    return {
        name: ((got[name].double() - each).abs().max() / each.abs().max()).item()
        for name, each in expected.items()
    }


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["again", "entropy", "uniform", "uniform, but it is not"])
def test_numbers_and_gradients_are_those_of_the_formula_in_float64(
    kind: str, bias: bool, temperature: float
) -> None:
    given = inputs(torch.float32, bias=bias)
    generator = torch.Generator().manual_seed(2)
    weights, of_entropy = torch.randn(2, K, generator=generator)
    if kind == "uniform":
        weights = torch.full_like(weights, -0.37)
    settings: dict[str, Any] = {"temperature": temperature}
    entropy = of_entropy if kind == "entropy" else None

    got = learned(
        linear_logprobs, given, weights, entropy,
        uniform=kind.startswith("uniform"), tile=SMALL, **settings,
    )  # fmt: skip

    expected = learned(exactly, given, weights, entropy, **settings)
    assert max(errors(got, expected).values()) < 1e-5


@pytest.mark.parametrize("frozen", [{"weight"}, {"weight", "bias"}, {"hidden"}, {"bias"}])
@pytest.mark.parametrize("uniform", [False, True])
def test_only_what_learns_gets_a_gradient(frozen: set[str], uniform: bool) -> None:
    given = inputs(torch.float32, bias=True)
    for name in frozen:
        given[name].requires_grad_(False)
    weights = torch.linspace(-1, 1, K)

    got = learned(linear_logprobs, given, weights, temperature=0.9, tile=SMALL, uniform=uniform)

    expected = learned(exactly, given, weights, temperature=0.9)
    assert max(errors(got, expected).values()) < 1e-5
    assert got.keys() == {"logprobs", *({"hidden", "weight", "bias"} - frozen)}


@pytest.mark.parametrize("uniform", [False, True])
def test_bf16_is_as_near_as_the_plain_way(uniform: bool) -> None:
    given = inputs(torch.bfloat16, bias=True)
    weights = torch.full((K,), 0.5)

    got = learned(linear_logprobs, given, weights, temperature=0.9, tile=SMALL, uniform=uniform)

    plain = learned(plainly, given, weights, temperature=0.9)
    expected = learned(exactly, given, weights, temperature=0.9)
    ours, theirs = errors(got, expected), errors(plain, expected)
    assert all(each.dtype == torch.bfloat16 for name, each in got.items() if name != "logprobs")
    assert all(ours[name] < 2 * theirs[name] + 2**-9 for name in ours)


@pytest.mark.parametrize("tile", [1, V, K, SMALL, 33 * V + 1, K * V - 1])
@torch.no_grad()
def test_any_tile_says_the_same(tile: int) -> None:
    given = inputs(torch.float32, bias=True)

    logprobs, entropies = linear_logprobs(
        given["hidden"], given["weight"], given["bias"], targets(), entropy=True, tile=tile
    )

    expected = exactly(*given.values(), targets(), temperature=1.0, entropy=True)
    torch.testing.assert_close(logprobs.double(), expected[0], rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(entropies, expected[1].float(), rtol=1e-5, atol=2e-6)


@torch.no_grad()
def test_logits_of_any_size_neither_overflow_nor_vanish() -> None:
    hidden = torch.tensor([[1.0], [-1.0], [0.0]])
    weight = torch.tensor([[1e4], [-1e4], [0.0], [9999.0]])
    chosen = torch.tensor([0, 1, 2])

    for tile in (3, 6, 12):
        logprobs, entropies = linear_logprobs(hidden, weight, None, chosen, entropy=True, tile=tile)

        second = math.exp(-1) / (1 + math.exp(-1))
        first = 1 - second
        torch.testing.assert_close(
            logprobs, torch.tensor([math.log(first), 0.0, -math.log(4)]), rtol=1e-5, atol=1e-6
        )
        mixed = -first * math.log(first) - second * math.log(second)
        torch.testing.assert_close(
            entropies, torch.tensor([mixed, 0.0, math.log(4)]), rtol=1e-5, atol=1e-6
        )


@pytest.mark.jobs
@pytest.mark.parametrize(("uniform", "entropy"), [(False, True), (True, False)])
def test_memory_is_at_most_a_sixth_of_the_plain_ways(uniform: bool, entropy: bool) -> None:
    count, words, width = 2048, 50_272, 16
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, width, generator=generator).requires_grad_()
    weight = torch.randn(words, width, generator=generator).requires_grad_()
    chosen = torch.randint(0, words, (count,), generator=generator)

    def peak(compute: Callable[..., tuple[Tensor, Tensor | None]], **settings: Any) -> float:
        def step() -> None:
            logprobs, entropies = compute(hidden, weight, None, chosen, entropy=entropy, **settings)
            loss = logprobs.sum() if entropies is None else logprobs.sum() + entropies.sum()
            loss.backward()
            hidden.grad = weight.grad = None

        return measure_peak_bytes(step) - hidden.nbytes - weight.nbytes

    plain = peak(plainly, temperature=1.0)
    ours = peak(linear_logprobs, uniform=uniform)

    assert plain > 2 * count * words * 4  # it has the logits twice at least
    tile = (TILE if uniform else VOCABULARY_TILE)["cpu"]
    gradients = hidden.nbytes + weight.nbytes
    assert ours < (4 if entropy else 3) * 4 * tile + 2 * gradients
    assert ours <= plain / 6
