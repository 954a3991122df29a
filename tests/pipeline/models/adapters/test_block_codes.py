"""Weights in blocks of 4 or 8 bits: the codes and their errors."""

import warnings

import pytest
import torch
from torch import Tensor

from pipeline.models.adapters.quantized import BLOCK, NF4, Form, pack, unpack


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(3)) * 0.02).to(dtype)


def again(numbers: Tensor, form: Form, dtype: torch.dtype = torch.float32) -> Tensor:
    return unpack(pack(numbers, form), numbers.shape, form, dtype)


def test_a_block_by_hand() -> None:
    # The largest magnitude is 2: halves of the numbers go to the nearest code, and code by code
    # into half bytes, the first into the high one.
    numbers = torch.zeros(BLOCK)
    numbers[:6] = torch.tensor([2.0, -2.0, 0.1, 0.0, -1.0, 0.9])
    packed = pack(numbers, "nf4")

    assert packed["scales"].tolist() == [2.0]
    assert packed["codes"].tolist() == [0xF0, 0x87, 0x2C, *[0x77] * 29]
    expected = torch.zeros(BLOCK)
    expected[:6] = 2 * torch.tensor([1.0, -1.0, NF4[8], 0.0, NF4[2], NF4[12]])
    assert torch.equal(unpack(packed, numbers.shape, "nf4", torch.float32), expected)


def test_eight_bits_by_hand() -> None:
    numbers = torch.zeros(BLOCK)
    numbers[:3] = torch.tensor([-4.0, 2.0, 0.01])
    packed = pack(numbers, "int8")

    assert packed["codes"][:4].tolist() == [-127, 64, 0, 0]  # 63.5 goes to the even one
    assert again(numbers, "int8")[:2].tolist() == [-4.0, pytest.approx(64 * 4 / 127)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitsandbytes_has_the_same_codes_scales_and_numbers(dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = pytest.importorskip("bitsandbytes.functional")
    numbers = weight(96, 320, dtype=dtype)
    codes, state = peer.quantize_4bit(numbers, quant_type="nf4", blocksize=BLOCK)
    packed = pack(numbers, "nf4")

    assert torch.equal(packed["codes"], codes.view(-1))
    assert torch.equal(packed["scales"], state.absmax.float())
    assert torch.equal(
        unpack(packed, numbers.shape, "nf4", dtype), peer.dequantize_4bit(codes, state)
    )
