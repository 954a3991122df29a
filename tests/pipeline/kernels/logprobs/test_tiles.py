"""Tiled log-probabilities: accuracy, compared with float64, and memory."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.memory import measure_peak_bytes
from pipeline.kernels.logprobs import TILE, VOCABULARY_TILE, compute_logprobs, linear_logprobs

K, D, V = 70, 24, 150
SMALL_TILE = 16 * V
"""A tile of 16 targets, or of 34 tokens of the vocabulary."""

Inputs = dict[str, Tensor]


def plain_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, **settings: Any
) -> tuple[Tensor, Tensor | None]:
    return compute_logprobs(F.linear(hidden, weight, bias), targets, **settings)


def make_inputs(dtype: torch.dtype, *, bias: bool, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"hidden": (K, D), "weight": (V, D)} | ({"bias": (V,)} if bias else {})
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in tensors.items()}


def make_targets() -> Tensor:
    targets = torch.randint(0, V, (K,), generator=torch.Generator().manual_seed(1))
    return targets.index_fill(0, torch.tensor([0]), 0).index_fill(0, torch.tensor([1]), V - 1)


def run(
    compute: Callable[..., tuple[Tensor, Tensor | None]],
    inputs: Inputs,
    weights: Tensor,
    entropy_weights: Tensor | None = None,
    **settings: Any,
) -> Inputs:
    """Return log-probabilities, entropies and the gradients of a weighted sum of them."""
    leaves = {name: tensor.detach().clone() for name, tensor in inputs.items()}
    for name, leaf in leaves.items():
        leaf.requires_grad_(inputs[name].requires_grad)
    arguments = [leaves["hidden"], leaves["weight"], leaves.get("bias"), make_targets()]
    logprobs, entropies = compute(*arguments, entropy=entropy_weights is not None, **settings)
    loss = (logprobs * weights).sum()
    results = {"logprobs": logprobs.detach()}
    if entropy_weights is not None:
        assert entropies is not None
        loss = loss + (entropies * entropy_weights).sum()
        results["entropies"] = entropies.detach()
    loss.backward()
    return results | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def exact_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, **settings: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute the formula in float64."""
    logits = hidden.double() @ weight.double().T
    logits = (logits if bias is None else logits + bias.double()) / settings["temperature"]
    logprobs = logits - logits.exp().sum(dim=1, keepdim=True).log()
    entropies = -(logprobs.exp() * logprobs).sum(dim=1) if settings["entropy"] else None
    return logprobs[torch.arange(len(targets)), targets], entropies


def errors(got: Inputs, expected: Inputs) -> dict[str, float]:
    """Return the largest error of each tensor, relative to its largest element."""
    assert got.keys() == expected.keys()
    return {
        name: ((got[name].double() - exact).abs().max() / exact.abs().max()).item()
        for name, exact in expected.items()
    }


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["weighted", "entropy", "uniform", "uniform with other weights"])
def test_results_and_gradients_match_the_formula_in_float64(
    kind: str, bias: bool, temperature: float
) -> None:
    inputs = make_inputs(torch.float32, bias=bias)
    generator = torch.Generator().manual_seed(2)
    weights, entropy_weights = torch.randn(2, K, generator=generator)
    if kind == "uniform":
        weights = torch.full_like(weights, -0.37)
    settings: dict[str, Any] = {"temperature": temperature}
    entropy = entropy_weights if kind == "entropy" else None

    got = run(
        linear_logprobs, inputs, weights, entropy,
        uniform=kind.startswith("uniform"), tile=SMALL_TILE, **settings,
    )  # fmt: skip

    expected = run(exact_logprobs, inputs, weights, entropy, **settings)
    assert max(errors(got, expected).values()) < 1e-5


@pytest.mark.parametrize("frozen", [{"weight"}, {"weight", "bias"}, {"hidden"}, {"bias"}])
@pytest.mark.parametrize("uniform", [False, True])
def test_only_trained_tensors_get_a_gradient(frozen: set[str], uniform: bool) -> None:
    inputs = make_inputs(torch.float32, bias=True)
    for name in frozen:
        inputs[name].requires_grad_(False)
    weights = torch.linspace(-1, 1, K)

    got = run(linear_logprobs, inputs, weights, temperature=0.9, tile=SMALL_TILE, uniform=uniform)

    expected = run(exact_logprobs, inputs, weights, temperature=0.9)
    assert max(errors(got, expected).values()) < 1e-5
    assert got.keys() == {"logprobs", *({"hidden", "weight", "bias"} - frozen)}


@pytest.mark.parametrize("uniform", [False, True])
def test_bf16_is_as_accurate_as_plain_logprobs(uniform: bool) -> None:
    inputs = make_inputs(torch.bfloat16, bias=True)
    weights = torch.full((K,), 0.5)

    got = run(linear_logprobs, inputs, weights, temperature=0.9, tile=SMALL_TILE, uniform=uniform)

    plain = run(plain_logprobs, inputs, weights, temperature=0.9)
    expected = run(exact_logprobs, inputs, weights, temperature=0.9)
    tiled_errors, plain_errors = errors(got, expected), errors(plain, expected)
    assert all(x.dtype == torch.bfloat16 for name, x in got.items() if name != "logprobs")
    assert all(tiled_errors[name] < 2 * plain_errors[name] + 2**-9 for name in tiled_errors)


@pytest.mark.parametrize("tile", [SMALL_TILE, None])
@pytest.mark.parametrize("uniform", [False, True])
def test_logits_of_fp32_hidden_states_are_not_rounded(uniform: bool, tile: int | None) -> None:
    inputs = {name: 2 * tensor for name, tensor in make_inputs(torch.bfloat16, bias=True).items()}
    settings = {"temperature": 0.9, "uniform": uniform, "tile": tile}
    weights = torch.full((K,), 0.5)

    def compute(hidden: Tensor, *rest: Tensor, **settings: Any) -> tuple[Tensor, Tensor | None]:
        return linear_logprobs(hidden.float(), *rest, **settings)

    got = run(compute, inputs, weights, **settings)

    expected = run(exact_logprobs, inputs, weights, temperature=0.9)
    rounded = run(linear_logprobs, inputs, weights, **settings)
    assert (got["logprobs"] - expected["logprobs"]).abs().max() < 2e-5
    assert (rounded["logprobs"] - expected["logprobs"]).abs().max() > 0.02
    assert all(got[name].dtype == torch.bfloat16 for name in inputs)
    assert max(errors(got, expected).values()) < 0.01


@pytest.mark.parametrize("tile", [1, V, K, SMALL_TILE, 33 * V + 1, K * V - 1])
@torch.no_grad()
def test_results_do_not_depend_on_the_tile(tile: int) -> None:
    inputs = make_inputs(torch.float32, bias=True)

    logprobs, entropies = linear_logprobs(
        inputs["hidden"], inputs["weight"], inputs["bias"], make_targets(), entropy=True, tile=tile
    )

    expected = exact_logprobs(*inputs.values(), make_targets(), temperature=1.0, entropy=True)
    torch.testing.assert_close(logprobs.double(), expected[0], rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(entropies, expected[1].float(), rtol=1e-5, atol=2e-6)


@torch.no_grad()
def test_extreme_logits_neither_overflow_nor_underflow() -> None:
    hidden = torch.tensor([[1.0], [-1.0], [0.0]])
    weight = torch.tensor([[1e4], [-1e4], [0.0], [9999.0]])
    targets = torch.tensor([0, 1, 2])

    for tile in (3, 6, 12):
        logprobs, entropies = linear_logprobs(
            hidden, weight, None, targets, entropy=True, tile=tile
        )

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
def test_peak_memory_is_at_most_a_sixth_of_plain_logprobs(uniform: bool, entropy: bool) -> None:
    count, vocab_size, width = 2048, 50_272, 16
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, width, generator=generator).requires_grad_()
    weight = torch.randn(vocab_size, width, generator=generator).requires_grad_()
    targets = torch.randint(0, vocab_size, (count,), generator=generator)

    def peak(compute: Callable[..., tuple[Tensor, Tensor | None]], **settings: Any) -> float:
        def step() -> None:
            logprobs, entropies = compute(
                hidden, weight, None, targets, entropy=entropy, **settings
            )
            loss = logprobs.sum() if entropies is None else logprobs.sum() + entropies.sum()
            loss.backward()
            hidden.grad = weight.grad = None

        return measure_peak_bytes(step) - hidden.nbytes - weight.nbytes

    plain = peak(plain_logprobs, temperature=1.0)
    tiled = peak(linear_logprobs, uniform=uniform)

    assert plain > 2 * count * vocab_size * 4  # which stores the logits at least twice
    tile = (TILE if uniform else VOCABULARY_TILE)["cpu"]
    gradients = hidden.nbytes + weight.nbytes
    assert tiled < (4 if entropy else 3) * 4 * tile + 2 * gradients
    assert tiled <= plain / 6
