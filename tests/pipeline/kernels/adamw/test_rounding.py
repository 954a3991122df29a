"""Rounding of AdamW to 16 bits: every number, ties, NaN."""

import math
from dataclasses import replace

import pytest
import torch

from pipeline.config import Kernels
from pipeline.kernels.adamw import AdamW, Weights, adamw_, join_master, split_master

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
STEP = AdamW(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=3, multiplier=0.37)

NO_DECAY = replace(STEP, weight_decay=0.0)
"""A step that moves no weight without a gradient."""

INCREMENTS = {-1: 0, 0: 0, 1: 0, 0x7FFF: 0, 0x8000: 1, 0x8001: 1}
"""Last 16 bits of an fp32 number, and how many bf16 away from zero it is rounded."""


@pytest.mark.parametrize(("split", "kernels"), [(False, "off"), (True, "required")])
def test_bf16_weights_are_rounded_to_nearest_ties_away_from_zero(
    kernels: Kernels, *, split: bool
) -> None:
    upper = torch.arange(-(2**15), 2**15)
    values = torch.cat([(upper * 2**16 + low).int() for low in INCREMENTS]).view(FP32)
    expected = torch.cat([upper + n for n in INCREMENTS.values()]).short().view(BF16)
    values, expected = values[values.isfinite()], expected[values.isfinite()]
    if split:
        rounded, low_bits = split_master(values)
        weights = Weights(rounded, *torch.zeros(2, len(values)), low_bits=low_bits)
    else:
        rounded = torch.zeros(len(values), dtype=BF16)
        weights = Weights(values, *torch.zeros(2, len(values)), rounded)

    adamw_(weights, torch.zeros(len(values)), NO_DECAY, kernels=kernels)

    assert torch.equal(rounded, expected)


def test_splitting_and_joining_keeps_every_float_but_nan() -> None:
    bits = torch.arange(-(2**31), 2**31 - 1, 65521, dtype=torch.int64).int()
    edges = torch.tensor([0.0, -0.0, math.inf, -math.inf, 3.4028235e38, -3.4028235e38, 1e-45])
    values = torch.cat([bits.view(FP32), edges])
    values = values[~values.isnan()]

    joined = join_master(*split_master(values))

    assert torch.equal(joined.view(torch.int32), values.view(torch.int32))
