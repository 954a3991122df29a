"""Moments in 8 bits: what they round to, how far they may be off, and that their mean is right."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from pipeline.config import Kernels
from pipeline.kernels.adamw.definition import AdamW, Weights, new_moments, read_moments
from pipeline.kernels.adamw.dispatch import adamw_
from pipeline.kernels.adamw.eight_bits import (
    AVERAGE,
    BLOCK,
    SQUARE,
    Codes,
    decode,
    encode,
)

BOTH = pytest.mark.parametrize("codes", [AVERAGE, SQUARE], ids=["average", "square"])
STEP = AdamW(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, step=1)


def noise(share: float, numel: int, codes: Codes) -> Tensor:
    """Random bits that round a number up if it is nearer to the upper code than this share."""
    bits = int(share * (2**20 - 1)) << (0 if codes.signed else 12)
    return torch.full((numel,), bits, dtype=torch.int64).int()


def both(share: float, values: Tensor, codes: Codes) -> Tensor:
    """Codes of values, and the values that they decode to."""
    return decode(*encode(values, noise(share, values.numel(), codes), codes), codes)


def test_codes_of_a_block_by_hand() -> None:
    # The largest is 1.5 * 2^3: exponent 127 + 3. Codes are exponent, then three bits of mantissa.
    values = [12.0, 8.0, -9.0, 5.5, 2.0**-14, 0.0, -0.0, 3 * 2.0**-14, 2.0**-11]
    values = torch.tensor([*values, *[0.0] * 20])
    codes, exponents = encode(values, torch.zeros(29, dtype=torch.int32), AVERAGE)

    top, sign = 15 << 3, 128
    assert exponents.tolist() == [130]
    assert codes.tolist()[:9] == [
        top | 4,  # 1.5
        top,  # 1
        sign | top | 1,  # 1.125
        (14 << 3) | 3,  # 1.375 / 2
        1,  # the smallest, 2^-17 of 2^3
        *(0, 128, 3, 1 << 3),  # and the first with an exponent
    ]
    assert torch.equal(decode(codes, exponents, AVERAGE), values)


@BOTH
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_number_is_off_by_less_than_the_stated_error(codes: Codes, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1000 * BLOCK, generator=generator)
    values *= (8 * torch.randn(1000 * BLOCK, generator=generator)).exp()
    values = (values if codes.signed else values.abs()).clamp(-1e30, 1e30)

    error = (both(share, values, codes).double() - values.double()).abs()

    power = values.abs().view(-1, BLOCK).amax(1).log2().floor().repeat_interleave(BLOCK)
    smallest = 2.0 ** (power - (16 if codes.signed else 32))
    assert (error < torch.maximum(values.abs() / 8, smallest)).all()
    assert (error[values.abs() > smallest * 16] > 0).any()


@pytest.mark.parametrize("kernels", ["required", "off"])
def test_kernels_lose_the_same_blocks(kernels: Kernels) -> None:
    gradient = torch.ones(2 * BLOCK)
    gradient[3] = math.inf
    weights = Weights(torch.ones(2 * BLOCK), **new_moments(gradient, torch.uint8))

    adamw_(weights, gradient, STEP, kernels=kernels)

    for moment in read_moments(weights):
        assert not moment[:BLOCK].isfinite().any()
        assert moment[BLOCK:].isfinite().all()


def test_training_ends_as_near_the_minimum_as_with_fp32() -> None:
    """Least squares from 64 noisy rows a step: the distance from the solution, 256 weights."""
    generator = torch.Generator().manual_seed(2)
    solution = torch.randn(256, generator=generator)
    scales = torch.logspace(-2, 0, 256)  # so that gradients differ by two orders of magnitude
    distances: dict[torch.dtype, float] = {}
    for dtype in (torch.float32, torch.uint8):
        generator.manual_seed(3)
        weights = Weights(torch.zeros(256), **new_moments(torch.zeros(256), dtype))
        for number in range(1, 601):
            rows = torch.randn(64, 256, generator=generator) * scales
            noise = 0.1 * torch.randn(64, generator=generator)
            gradient = rows.T @ (rows @ (weights.master - solution) - noise) / 64
            rate = 0.05 * (1 - number / 600)
            adamw_(weights, gradient, dataclasses.replace(STEP, step=number, lr=rate))
        distances[dtype] = ((weights.master - solution) * scales).norm().item()

    assert distances[torch.float32] < 0.05 * (solution * scales).norm().item()
    assert distances[torch.uint8] == pytest.approx(distances[torch.float32], rel=0.05)
