"""Bitwise tests of all options and implementations of AdamW, and one against float64."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.config import Kernels
from pipeline.kernels.adamw import (
    AdamW,
    Weights,
    adamw_,
    join_master,
    reference_adamw_,
    split_master,
)

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
STEP = AdamW(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=3, multiplier=0.37)
SIZES = (1, 15, 37, 65536 + 37)
"""Sizes that are no multiples of a SIMD vector or of the kernel's block."""


def make_vectors(
    numel: int, *, moments: torch.dtype = FP32, copy: torch.dtype | None = None, split: bool = False
) -> tuple[Weights, Tensor]:
    """Return numbers of magnitudes from 1e-7 to 1e7, and moments that such gradients produce."""
    generator = torch.Generator().manual_seed(numel)

    def random_magnitudes() -> Tensor:
        exponents = 4 * torch.randn(numel, generator=generator)
        return torch.randn(numel, generator=generator) * exponents.clamp(-16, 10).exp()

    master, low_bits = random_magnitudes(), None
    if split:
        master, low_bits = split_master(master)
    weights = Weights(
        master,
        random_magnitudes().to(moments),
        random_magnitudes().square().clamp(max=1e30).to(moments),
        copy=None if copy is None else torch.full((numel,), math.nan, dtype=copy),
        low_bits=low_bits,
    )
    return weights, random_magnitudes()


def clone(weights: Weights) -> Weights:
    return Weights(**{name: tensor.clone() for name, tensor in weights.tensors().items()})


def option_combinations() -> Iterator[dict[str, Any]]:
    kinds = ({}, {"copy": BF16}, {"copy": FP16}, {"split": True})
    for moments, kind in itertools.product((torch.float32, torch.bfloat16), kinds):
        yield {"moments": moments, **kind}


def option_id(options: dict[str, Any]) -> str:
    return ", ".join(str(value).removeprefix("torch.") for value in options.values())


@pytest.mark.parametrize("options", list(option_combinations()), ids=option_id)
def test_kernel_and_fallback_match_the_definition_bitwise(options: dict[str, Any]) -> None:
    for numel, beta1 in zip(SIZES, (0.9, 0.3, 0.9, 0.9), strict=True):
        weights, gradient = make_vectors(numel, **options)
        step = replace(STEP, betas=(beta1, 0.95))
        results: dict[str, Weights] = {}
        for kernels in ("required", "off"):
            results[kernels] = clone(weights)
            adamw_(results[kernels], gradient, step, kernels=kernels)
        expected = clone(weights)
        reference_adamw_(expected, gradient, step)

        for kernels, result in results.items():
            for name, tensor in expected.tensors().items():
                assert torch.equal(result.tensors()[name], tensor), (kernels, name, numel)
        assert not torch.equal(expected.exp_avg, weights.exp_avg)


@pytest.mark.parametrize("kernels", ["required", "off"])
def test_step_matches_the_formula_in_float64(kernels: Kernels) -> None:
    numel = 4096 + 5
    generator = torch.Generator().manual_seed(0)
    p, m, g = (torch.randn(numel, generator=generator) for _ in range(3))
    m, v = 0.1 * m, torch.rand(numel, generator=generator)
    weights = Weights(p.clone(), m.clone(), v.clone())

    adamw_(weights, g, STEP, kernels=kernels)

    p64, m64, v64, g64 = p.double(), m.double(), v.double(), 0.37 * g.double()
    largest = 0.9 * m64.abs() + 0.1 * g64.abs()
    m64 = 0.9 * m64 + 0.1 * g64
    v64 = 0.95 * v64 + 0.05 * g64**2
    scale = 1e-3 / (1 - 0.9**3) / ((v64 / (1 - 0.95**3)).sqrt() + 1e-8)
    p64 = p64 * (1 - 1e-3 * 0.1) - scale * m64
    # Half a unit in the last place for each of three roundings of p (factor, product and sum),
    # and eight units for the step, whose two terms may cancel.
    allowed = 3 * 2**-24 * (p.double().abs() + scale * largest) + 2**-20 * scale * largest
    assert ((weights.master.double() - p64).abs() <= allowed).all()
    torch.testing.assert_close(weights.exp_avg.double(), m64, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(weights.exp_avg_sq.double(), v64, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kernels", ["required", "off"])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.3, 0.5), (0.0, 0.0)])
def test_step_matches_fused_adamw_of_pytorch_bitwise(
    kernels: Kernels, betas: tuple[float, float]
) -> None:
    weights, gradient = make_vectors(64 * 1024 + 16)
    param = torch.nn.Parameter(weights.master.clone())
    optimizer = torch.optim.AdamW(
        [param], lr=1e-3, betas=betas, eps=1e-8, weight_decay=0.1, fused=True
    )
    state = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
    weights = Weights(weights.master, **{name: value.clone() for name, value in state.items()})

    for step in range(1, 5):
        param.grad = gradient * 0.37
        optimizer.step()
        adamw_(weights, gradient, replace(STEP, betas=betas, step=step), kernels=kernels)
        gradient = gradient.roll(1)

    assert torch.equal(weights.master, param)
    for name, value in weights.tensors().items():
        assert name == "master" or torch.equal(value, optimizer.state[param][name])


def test_split_master_matches_the_fp32_master_bitwise() -> None:
    plain, gradient = make_vectors(10_000, copy=BF16)
    weights, low_bits = split_master(plain.master)
    split = Weights(weights, plain.exp_avg.clone(), plain.exp_avg_sq.clone(), low_bits=low_bits)

    for step in range(1, 4):
        adamw_(plain, gradient, replace(STEP, step=step))
        adamw_(split, gradient, replace(STEP, step=step))

    assert torch.equal(join_master(split.master, low_bits), plain.master)
    assert plain.copy is not None
    assert torch.equal(split.master, plain.copy)
