"""Every option of AdamW by every implementation, to the bit, and against the formula in float64."""

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
ODD = (1, 15, 37, 65536 + 37)
"""A lane and a bit, a block of the kernel and a bit."""


def vectors(
    numel: int,
    *,
    moments: torch.dtype = FP32,
    copy: torch.dtype | None = None,
    split: bool = False,
) -> tuple[Weights, Tensor]:
    """Numbers of all magnitudes from 1e-7 to 1e7, and moments as they come from such gradients."""
    generator = torch.Generator().manual_seed(numel)

    def spread() -> Tensor:
        exponents = 4 * torch.randn(numel, generator=generator)
        return torch.randn(numel, generator=generator) * exponents.clamp(-16, 10).exp()

    master, low_bits = spread(), None
    if split:
        master, low_bits = split_master(master)
    weights = Weights(
        master,
        spread().to(moments),
        spread().square().clamp(max=1e30).to(moments),
        copy=None if copy is None else torch.full((numel,), math.nan, dtype=copy),
        low_bits=low_bits,
    )
    return weights, spread()


def copied(weights: Weights) -> Weights:
    return Weights(**{name: tensor.clone() for name, tensor in weights.tensors().items()})


def options() -> Iterator[dict[str, Any]]:
    kinds = ({}, {"copy": BF16}, {"copy": FP16}, {"split": True})
    for moments, kind in itertools.product((torch.float32, torch.bfloat16), kinds):
        yield {"moments": moments, **kind}


def name(option: dict[str, Any]) -> str:
    return ", ".join(str(each).removeprefix("torch.") for each in option.values())


@pytest.mark.parametrize("option", list(options()), ids=name)
def test_kernel_and_fallback_give_the_bits_of_the_definition(option: dict[str, Any]) -> None:
    for numel, beta1 in zip(ODD, (0.9, 0.3, 0.9, 0.9), strict=True):
        weights, gradient = vectors(numel, **option)
        step = replace(STEP, betas=(beta1, 0.95))
        ended: dict[str, Weights] = {}
        for kernels in ("required", "off"):
            ended[kernels] = copied(weights)
            adamw_(ended[kernels], gradient, step, kernels=kernels)
        expected = copied(weights)
        reference_adamw_(expected, gradient, step)

        for kernels, got in ended.items():
            for each, tensor in expected.tensors().items():
                assert torch.equal(got.tensors()[each], tensor), (kernels, each, numel)
        assert not torch.equal(expected.exp_avg, weights.exp_avg)


@pytest.mark.parametrize("kernels", ["required", "off"])
def test_a_step_is_that_of_the_formula_in_float64(kernels: Kernels) -> None:
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
    # Half a unit in the last place for each of three roundings of p (of the factor, the product and
    # the sum), and eight units for what leads to the step, whose two terms may cancel.
    allowed = 3 * 2**-24 * (p.double().abs() + scale * largest) + 2**-20 * scale * largest
    assert ((weights.master.double() - p64).abs() <= allowed).all()
    torch.testing.assert_close(weights.exp_avg.double(), m64, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(weights.exp_avg_sq.double(), v64, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kernels", ["required", "off"])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.3, 0.5), (0.0, 0.0)])
def test_the_bits_are_those_of_pytorchs_fused_adamw(
    kernels: Kernels, betas: tuple[float, float]
) -> None:
    weights, gradient = vectors(64 * 1024 + 16)
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


def test_a_split_master_is_the_fp32_master_to_the_bit() -> None:
    whole, gradient = vectors(10_000, copy=BF16)
    weights, low_bits = split_master(whole.master)
    split = Weights(weights, whole.exp_avg.clone(), whole.exp_avg_sq.clone(), low_bits=low_bits)

    for step in range(1, 4):
        adamw_(whole, gradient, replace(STEP, step=step))
        adamw_(split, gradient, replace(STEP, step=step))

    assert torch.equal(join_master(split.master, low_bits), whole.master)
    assert whole.copy is not None
    assert torch.equal(split.master, whole.copy)
