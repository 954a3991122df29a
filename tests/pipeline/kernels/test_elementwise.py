"""RMSNorm and rotary embedding on the CPU, compared with float64 and PyTorch."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from pipeline.kernels.elementwise import prepare_norm, prepare_rotation, prepare_silu_product
from tests.pipeline.kernels.numbers import random, relative_error


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


@pytest.mark.parametrize("size", [2, 33, 576])
def test_norm_is_at_least_as_accurate_as_pytorch(size: int) -> None:
    x, weight = random(1, 16, size), random(size, seed=1)
    out = torch.full_like(x, torch.nan)
    call = prepare_norm(x, weight, out, 1e-5)
    assert call is not None, "the kernel can't be built on this machine"
    call()

    exact = norm(x.double(), weight.double())
    assert relative_error(out, exact) <= 1.1 * relative_error(norm(x, weight), exact)


def test_rotation_in_any_layout_is_at_least_as_accurate_as_pytorch() -> None:
    x = random(1, 5, 3, 24).transpose(1, 2)
    angles = random(1, 1, 5, 24, seed=1)
    out = torch.full((1, 3, 5, 24), torch.nan)
    cos, sin = angles.cos(), angles.sin()
    call = prepare_rotation(x, cos, sin, out)
    assert call is not None
    call()

    exact = rotate(x.double(), cos.double(), sin.double())
    assert relative_error(out, exact) <= 1.1 * relative_error(rotate(x, cos, sin), exact)


def test_gate_is_at_least_as_accurate_as_pytorch_and_saturates() -> None:
    x, up = 4 * random(3, 67), random(3, 67, seed=1)
    x[0, :3] = torch.tensor([-200.0, 200.0, torch.nan])
    out = torch.empty_like(x)
    call = prepare_silu_product(x, up, out)
    assert call is not None
    call()

    exact = silu(x.double()) * up.double()
    assert out[0, 2].isnan()
    assert out[0, :2].tolist() == [pytest.approx(0, abs=1e-30), 200 * up[0, 1]]
    assert relative_error(out[1:], exact[1:]) <= 1.1 * relative_error(
        silu(x[1:]) * up[1:], exact[1:]
    )


def test_other_dtypes_are_left_to_pytorch() -> None:
    x, weight, out = random(2, 48), random(48), torch.empty(2, 48)

    assert prepare_norm(x, weight.bfloat16(), out, 1e-5) is None
