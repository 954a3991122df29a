"""Rounding of AdamW to 16 bits: every number, ties, NaN."""

import math
from dataclasses import replace

import pytest
import torch

from pipeline.config import Kernels
from pipeline.kernels.adamw import (
    AdamW,
    Weights,
    adamw_,
    join_master,
    round_weights,
    split_master,
)

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
STEP = AdamW(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=3, multiplier=0.37)


STILL = replace(STEP, weight_decay=0.0)
"""Without a gradient nothing moves."""


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
        got, low_bits = split_master(values)
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


def test_masters_are_rounded_to_the_nearest_bf16_ties_away_from_zero() -> None:
    masters = torch.tensor(list(WEIGHTS)).int().view(FP32)

    weights = round_weights(masters, BF16)

    assert [bits & 0xFFFF for bits in weights.view(torch.int16).tolist()] == list(WEIGHTS.values())


def test_every_float_but_nan_survives_being_split() -> None:
    bits = torch.arange(-(2**31), 2**31 - 1, 65521, dtype=torch.int64).int()
    edges = torch.tensor([0.0, -0.0, math.inf, -math.inf, 3.4028235e38, -3.4028235e38, 1e-45])
    values = torch.cat([bits.view(FP32), edges])
    values = values[~values.isnan()]

    joined = join_master(*split_master(values))

    assert torch.equal(joined.view(torch.int32), values.view(torch.int32))
