"""What AdamW rounds to 16 bits: each number, ties, NaN."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pipeline.config import Kernels
from pipeline.kernels.adamw import definition
from pipeline.kernels.adamw.definition import AdamW, Weights
from pipeline.kernels.adamw.dispatch import adamw_

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
STEP = AdamW(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=3, multiplier=0.37)


def all_fp16() -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(FP16)


STILL = replace(STEP, weight_decay=0.0)
"""Without a gradient nothing moves."""


def around(dtype: torch.dtype) -> Tensor:
    """Every number of a 16-bit format, and fp32 beside and between them."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).float()
    every = every[every.isfinite()]
    ulps = every.view(torch.int32)
    shifts = (-1, 0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001)
    values = torch.cat([(ulps + shift).view(FP32) for shift in shifts])
    return torch.cat([values[values.isfinite()], torch.tensor([65519.99, 65520.0, 3e38, -3e38])])


def test_fp16_weights_are_rounded_as_pytorch_rounds() -> None:
    values = around(FP16)
    copy = torch.zeros(len(values), dtype=FP16)
    weights = Weights(values.clone(), *torch.zeros(2, len(values)), copy)

    adamw_(weights, torch.zeros_like(values), STILL, kernels="required")

    assert torch.equal(weights.master, values)
    assert torch.equal(copy, values.half())


@pytest.mark.parametrize("kernels", ["required", "off"])
def test_bf16_moments_are_rounded_as_pytorch_rounds(kernels: Kernels) -> None:
    values = around(BF16)
    weights = Weights(torch.zeros(len(values)), *torch.zeros(2, len(values), dtype=BF16))

    # With a beta1 of 0 the moment is the gradient.
    step = replace(STEP, betas=(0.0, 0.95), multiplier=1.0)
    adamw_(weights, values, step, kernels=kernels)

    assert torch.equal(weights.exp_avg, values.bfloat16())


FURTHER = {-1: 0, 0: 0, 1: 0, 0x7FFF: 0, 0x8000: 1, 0x8001: 1}
"""fp32's last bits above a bf16, and how many bf16 further it is rounded, away from zero."""


@pytest.mark.parametrize(("split", "kernels"), [(False, "off"), (True, "required")])
def test_bf16_weights_are_the_nearest_and_of_two_equally_near_the_larger(
    kernels: Kernels, *, split: bool
) -> None:
    every = torch.arange(-(2**15), 2**15)
    values = torch.cat([(every * 2**16 + rest).int() for rest in FURTHER]).view(FP32)
    expected = torch.cat([every + further for further in FURTHER.values()]).short().view(BF16)
    values, expected = values[values.isfinite()], expected[values.isfinite()]
    if split:
        got, low_bits = definition.split_master(values)
        weights = Weights(got, *torch.zeros(2, len(values)), low_bits=low_bits)
    else:
        got = torch.zeros(len(values), dtype=BF16)
        weights = Weights(values, *torch.zeros(2, len(values)), got)

    adamw_(weights, torch.zeros(len(values)), STILL, kernels=kernels)

    assert torch.equal(got, expected)


WEIGHTS = {
    0x3F800000: 0x3F80,  # 1
    0x3F807FFF: 0x3F80,
    0x3F808000: 0x3F81,  # half way from an even one
    0x3F818000: 0x3F82,  # and from an odd one
    0xBF808000: 0xBF81,
    0xBF807FFF: 0xBF80,
    0x00007FFF: 0x0000,
    0x00008000: 0x0001,
    0x80000000: 0x8000,
    0x7F7F7FFF: 0x7F7F,
    0x7F7F8000: 0x7F80,  # beyond the largest comes infinity
    0x7F800000: 0x7F80,
    0xFF800000: 0xFF80,
}
"""fp32 and the bf16 that it is rounded to, as bits."""

NANS = (0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF)
"""Cut off the first two would be infinite, and rounded up the others zero."""


def test_masters_are_rounded_to_the_nearest_bf16_ties_away_from_zero() -> None:
    masters = torch.tensor(list(WEIGHTS)).int().view(FP32)

    weights = definition.round_weights(masters, BF16)

    assert [bits & 0xFFFF for bits in weights.view(torch.int16).tolist()] == list(WEIGHTS.values())


def test_masters_are_rounded_to_fp16_with_ties_to_even() -> None:
    # 1 + 2^-11 and 1 + 3 * 2^-11, between numbers 2^-10 apart.
    masters = torch.tensor([0x3F801000, 0x3F803000]).int().view(FP32)

    assert definition.round_weights(masters, FP16).tolist() == [1.0, 1 + 2 * 2**-10]


@pytest.mark.parametrize("kernels", ["required", "off"])
def test_a_master_that_is_nan_stays_nan_split_or_not(kernels: Kernels) -> None:
    masters = torch.tensor(NANS).int().view(FP32)
    copy = torch.zeros(len(masters), dtype=BF16)
    whole = Weights(masters.clone(), *torch.zeros(2, len(masters)), copy)
    weights, low_bits = definition.split_master(masters)
    split = Weights(weights, *torch.zeros(2, len(masters)), low_bits=low_bits)
    assert definition.join_master(weights, low_bits).isnan().all()

    adamw_(whole, torch.zeros(len(masters)), STEP, kernels=kernels)
    adamw_(split, torch.zeros(len(masters)), STEP, kernels=kernels)

    for each in (copy, weights, definition.join_master(weights, low_bits)):
        assert each.isnan().all()


def test_every_fp16_gradient_is_read_as_what_it_is() -> None:
    gradient = all_fp16()[all_fp16().isfinite()]
    got = Weights(*torch.zeros(3, len(gradient)))

    adamw_(got, gradient, replace(STEP, betas=(0.0, 0.0), multiplier=1.0), kernels="required")

    assert torch.equal(got.exp_avg, gradient.float())


def test_every_float_but_nan_survives_being_split() -> None:
    bits = torch.arange(-(2**31), 2**31 - 1, 65521, dtype=torch.int64).int()
    edges = torch.tensor([0.0, -0.0, math.inf, -math.inf, 3.4028235e38, -3.4028235e38, 1e-45])
    values = torch.cat([bits.view(FP32), edges])
    values = values[~values.isnan()]

    joined = definition.join_master(*definition.split_master(values))

    assert torch.equal(joined.view(torch.int32), values.view(torch.int32))
