"""Codes of weights that are quantized in blocks to 4 or 8 bits."""

import warnings

import pytest
import torch
from torch import Tensor

from pipeline.kernels.choice import KERNELS_VARIABLE
from pipeline.models.adapters.quantized import BLOCK, NF4, dequantize, quantize


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(3)) * 0.02).to(dtype)


@pytest.mark.parametrize("kernels", ["required", "off"])
def test_nf4_codes_match_hand_computed_ones(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, kernels)
    # The largest magnitude is 2: the halved values are rounded to the nearest codes. A byte
    # contains two codes, the first in its high bits.
    values = torch.zeros(1000 * BLOCK)
    values[-BLOCK:][:6] = torch.tensor([2.0, -2.0, 0.1, 0.0, -1.0, 0.9])
    packed = quantize(values, "nf4")

    assert packed["scales"].tolist() == [*[0.0] * 999, 2.0]
    assert packed["codes"].tolist()[-32:] == [0xF0, 0x87, 0x2C, *[0x77] * 29]
    expected = torch.zeros(1000 * BLOCK)
    expected[-BLOCK:][:6] = 2 * torch.tensor([1.0, -1.0, NF4[8], 0.0, NF4[2], NF4[12]])
    assert torch.equal(dequantize(packed, values.shape, "nf4", torch.float32), expected)


def test_int8_codes_match_hand_computed_ones() -> None:
    values = torch.zeros(BLOCK)
    values[:3] = torch.tensor([-4.0, 2.0, 0.01])
    packed = quantize(values, "int8")

    assert packed["codes"][:4].tolist() == [-127, 64, 0, 0]  # 63.5 is rounded to even
    restored = dequantize(packed, values.shape, "int8", torch.float32)
    assert restored[:2].tolist() == [-4.0, pytest.approx(64 * 4 / 127)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_matches_bitsandbytes(dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bitsandbytes = pytest.importorskip("bitsandbytes.functional")
    values = weight(96, 320, dtype=dtype)
    codes, state = bitsandbytes.quantize_4bit(values, quant_type="nf4", blocksize=BLOCK)
    packed = quantize(values, "nf4")

    assert torch.equal(packed["codes"], codes.view(-1))
    assert torch.equal(packed["scales"], state.absmax.float())
    assert torch.equal(
        dequantize(packed, values.shape, "nf4", dtype), bitsandbytes.dequantize_4bit(codes, state)
    )
