"""Linear layers on the CPU, compared with float64 and PyTorch."""

from itertools import product
from statistics import mean

import pytest
import torch
import torch.nn.functional as F

from pipeline.kernels.linear import Linear, LinearKernelMode, max_rows, prepare
from tests.pipeline.kernels.numbers import random, relative_error

F32, BF16 = torch.float32, torch.bfloat16

SIZES = ((48, 32), (102, 100), (2, 1), (290, 33), (1536, 576))
"""Inputs and outputs: full vectors and tiles, and remainders."""

MANY_ROWS = ((13, 576, 96), (64, 1538, 33), (131, 770, 18), (300, 96, 5))
"""Rows, inputs and outputs: several tiles of rows, and inputs that are added in blocks."""


def prepare_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[Linear, torch.Tensor]:
    out = torch.full((*x.shape[:-1], len(weight)), torch.nan, dtype=x.dtype)
    linear = prepare(x, weight, bias, out)
    assert linear is not None, "the kernel can't be built on this machine"
    return linear, out


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_linear_is_at_least_as_accurate_as_pytorch(
    dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    weight, random_bias = random(outputs, inputs, dtype=dtype), random(outputs, dtype=dtype)
    for rows, bias in product((1, 3, 7, 8), (None, random_bias)):
        errors, pytorch_errors = [], []
        for seed in range(1, 9):  # the error of one row of 32 outputs is mostly noise
            x = random(rows, inputs, dtype=dtype, seed=seed)
            linear, out = prepare_linear(x, weight, bias)
            linear()
            exact = F.linear(*(y if y is None else y.double() for y in (x, weight, bias)))
            errors.append(relative_error(out, exact))
            pytorch_errors.append(relative_error(F.linear(x, weight, bias), exact))
        assert mean(errors) < max(1.05 * mean(pytorch_errors), torch.finfo(dtype).eps / 2)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), MANY_ROWS)
def test_many_rows_are_at_least_as_accurate_as_pytorch(
    rows: int, inputs: int, outputs: int
) -> None:
    if rows > max_rows(F32):
        pytest.skip("PyTorch is faster on this processor")
    x, weight, bias = random(rows, inputs), random(outputs, inputs), random(outputs)
    linear, out = prepare_linear(x, weight, bias)
    linear()

    exact = F.linear(x.double(), weight.double(), bias.double())
    assert relative_error(out, exact) <= 1.05 * relative_error(F.linear(x, weight, bias), exact)


def test_mode_replaces_linear_layers_only_without_gradients() -> None:
    layer, x = torch.nn.Linear(576, 33), random(3, 5, 576).transpose(0, 1)
    linear, expected = prepare_linear(x.contiguous(), layer.weight, layer.bias)
    linear()
    with LinearKernelMode():
        with torch.inference_mode():
            computed = layer(x)
        trained = layer(x)
        layer(x.double().float()).sum().backward()

    assert torch.equal(computed, expected)
    assert trained.requires_grad
    assert layer.weight.grad is not None


def test_result_is_independent_of_threads_and_other_rows() -> None:
    x, weight = random(8, 96), random(3000, 96)
    linear, out = prepare_linear(x, weight)
    linear()
    single_row, single_out = prepare_linear(x[5:6].contiguous(), weight)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        single_row()
    finally:
        torch.set_num_threads(threads)

    torch.testing.assert_close(single_out[0], out[5], atol=1e-5, rtol=1e-5)


def test_unsupported_tensors_are_left_to_pytorch() -> None:
    x, weight, bias, out = random(3, 48), random(32, 48), random(32), torch.empty(3, 32)

    assert prepare(x, weight, bias, out) is not None
    for unsupported in (
        (x.double(), weight.double(), bias.double(), out.double()),
        (x, weight, bias, out.bfloat16()),
        (x, weight, bias, out.to("meta")),
        (random(48, 3).T, weight, bias, out),
        (x, random(48, 32).T, bias, out),
        (x, weight, random(3, 32), out),
        (x, weight, bias, torch.empty(96)),
        (random(0, 48), weight, bias, torch.empty(0, 32)),
        (random(9, 48, dtype=BF16), weight.bfloat16(), None, torch.empty(9, 32, dtype=BF16)),
        (x[:, :47].bfloat16().contiguous(), weight[:, :47].bfloat16(), None, out.bfloat16()),
    ):
        assert prepare(*unsupported) is None
