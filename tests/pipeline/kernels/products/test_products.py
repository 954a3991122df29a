"""Products of bf16 matrices in PyTorch's place: against the definition, themselves, and PyTorch.

The kernel is asked on any processor, also on one whose own instructions are faster.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.errors import KernelError
from pipeline.kernels.linear.cpu import order_of
from pipeline.kernels.linear.rows import fewest_rows
from pipeline.kernels.products import cpu, definition, dispatch
from pipeline.kernels.toolchain.cpp import Built, NotBuiltError

ROOT = Path(__file__).parents[4]
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}

SHAPES = ((1, 1, 1), (7, 5, 3), (33, 34, 16), (13, 257, 40), (100, 290, 768), (241, 511, 530))
"""Rows, inputs and outputs: whole blocks, tiles and pairs, and what is left over."""


@pytest.fixture
def in_place() -> Iterator[None]:
    if not isinstance(cpu.library(), Built):
        pytest.skip("the kernel can't be built here")
    with dispatch.in_place():
        yield


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def layouts(matrix: Tensor) -> tuple[Tensor, Tensor]:
    return matrix, matrix.mT.contiguous().mT


def require_near(ours: Tensor, terms: list[tuple[float, Tensor, Tensor | None]]) -> None:
    """Within the roundings of fp32 sums and one to bf16 of a sum of weighted products, in fp64."""
    exact, size = 0.0, 0.0
    for weight, a, b in terms:
        one, other = a.double(), None if b is None else b.double()
        exact = exact + weight * (one if other is None else one @ other)
        absolute = one.abs() if other is None else one.abs() @ other.abs()
        size = size + abs(weight) * absolute
    assert isinstance(exact, Tensor)
    assert isinstance(size, Tensor)
    assert ((ours.double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-20 * size).all()


@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_products_are_those_of_fp64_rounded_once_however_matrices_lie(
    rows: int, inputs: int, outputs: int
) -> None:
    a, b, bias = random(rows, inputs), random(inputs, outputs), random(outputs)

    products = [torch.mm(left, right) for left in layouts(a) for right in layouts(b)]
    shifted = [torch.addmm(bias, left, right) for left in layouts(a) for right in layouts(b)]

    require_near(products[0], [(1.0, a, b)])
    require_near(shifted[0], [(1.0, a, b), (1.0, bias, None)])
    assert all(torch.equal(products[0], each) for each in products[1:])
    assert all(torch.equal(shifted[0], each) for each in shifted[1:])


@pytest.mark.usefixtures("in_place")
def test_batches_shifts_and_factors_are_heeded() -> None:
    a, b = random(3, 50, 70), random(3, 70, 20)
    of_rows, of_all = random(50, 1), random(3, 50, 20)

    product = torch.bmm(a, b)
    by_rows = torch.baddbmm(of_rows, a, b, beta=-2, alpha=0.5)
    by_all = torch.baddbmm(of_all.mT.contiguous().mT, a, b)

    assert all(torch.equal(product[each], a[each] @ b[each]) for each in range(3))
    require_near(by_rows, [(0.5, a, b), (-2.0, of_rows, None)])
    require_near(by_all, [(1.0, a, b), (1.0, of_all, None)])
    torch.testing.assert_close(by_all, definition.product(a, b, of_all))
    assert torch.equal(torch.baddbmm(of_all, a, b, out=torch.empty_like(product)), by_all)


@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 32), (290, 33), (1030, 96)])
def test_a_row_has_the_same_bits_among_few_and_among_many(inputs: int, outputs: int) -> None:
    x, weight, bias = random(300, inputs), random(outputs, inputs), random(outputs)
    many = F.linear(x, weight, bias)

    for rows in (1, 4, 31, cpu.FEW_ROWS, cpu.FEW_ROWS + 1, 64, 241):
        few = F.linear(x[:rows].contiguous(), weight, bias)

        assert torch.equal(few, many[:rows]), rows


@pytest.mark.usefixtures("in_place")
def test_generation_knows_the_order_of_addition() -> None:
    assert order_of(torch.bfloat16, 768) == cpu.ORDER
    assert order_of(torch.bfloat16, 4096) == cpu.ORDER
    assert fewest_rows(torch.bfloat16) == 4


@pytest.mark.usefixtures("in_place")
def test_the_number_of_threads_changes_no_bit() -> None:
    a, b = random(500, 300), random(300, 600)
    threads, results = torch.get_num_threads(), list[Tensor]()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results.append(a @ b)
    finally:
        torch.set_num_threads(threads)

    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.usefixtures("in_place")
def test_autograd_takes_the_way_back_through_the_kernel() -> None:
    x, weight, bias = (
        random(*shape).requires_grad_() for shape in ((2, 90, 130), (70, 130), (70,))
    )
    grad = random(2, 90, 70)

    F.linear(x, weight, bias).backward(grad)

    assert x.grad is not None
    assert weight.grad is not None
    require_near(x.grad, [(1.0, grad, weight.detach())])
    require_near(weight.grad, [(1.0, grad.flatten(0, 1).T, x.detach().flatten(0, 1))])
    assert torch.equal(weight.grad, grad.flatten(0, 1).T @ x.detach().flatten(0, 1))


@pytest.mark.usefixtures("in_place")
def test_nan_and_infinity_go_through() -> None:
    a, b = torch.ones(40, 48).bfloat16(), torch.ones(48, 32).bfloat16()
    b[5, 3], b[6, 4] = torch.nan, torch.inf

    out = a @ b

    assert out[:, 3].isnan().all()
    assert out[:, 4].isposinf().all()
    assert (out[:, 5] == 48).all()


def test_pytorch_does_what_is_not_bf16_and_gets_its_place_back() -> None:
    a, b = torch.randn(40, 50), torch.randn(50, 60)
    own = a @ b, a.bfloat16() @ b.bfloat16()
    if not isinstance(cpu.library(), Built):
        pytest.skip("the kernel can't be built here")

    with dispatch.in_place():
        assert torch.equal(a @ b, own[0])
        assert order_of(torch.bfloat16, 1030) == cpu.ORDER
        with dispatch.suspended():
            assert torch.equal(a.bfloat16() @ b.bfloat16(), own[1])
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.mm(a.bfloat16(), b.bfloat16()[:40])

    assert not dispatch.is_in_place()
    assert torch.equal(a.bfloat16() @ b.bfloat16(), own[1])


def test_without_a_kernel_pytorch_keeps_its_place_or_the_run_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "is_needed", lambda: True)
    monkeypatch.setattr(cpu, "library", lambda: NotBuiltError("there is no compiler"))

    dispatch.take_over("off")
    dispatch.take_over("auto")

    assert not dispatch.is_in_place()
    with pytest.raises(KernelError, match="products of bf16 matrices can't be had: there is no"):
        dispatch.take_over("required")


def bits_of_products() -> dict[str, str]:
    """Digests of a product by the kernel and of a linear layer of few rows."""
    with dispatch.in_place():
        many = random(300, 290) @ random(290, 530)
        few = F.linear(random(5, 290), random(530, 290))
    return {
        name: hashlib.sha256(each.float().numpy().tobytes()).hexdigest()
        for name, each in (("many", many), ("few", few))
    }


@pytest.mark.jobs
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="needs an x86 processor")
@pytest.mark.usefixtures("in_place")
def test_with_256_bits_a_model_trains_by_the_kernel_with_the_bits_of_any_other_processor() -> None:
    program = """
import json, torch
from pipeline.config import TrainedModelConfig
from pipeline.kernels.products import dispatch
from pipeline.models.load import load_causal_lm
from tests.pipeline.kernels.products.test_products import bits_of_products
for precision, kernels in (("fp32", "auto"), ("bf16", "off"), ("bf16", "auto")):
    config = TrainedModelConfig(path="embedded", precision=precision, kernels=kernels)
    load_causal_lm(config, device=torch.device("cpu"))
    print(dispatch.is_in_place())
print(json.dumps(bits_of_products()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, **AVX2},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    *states, bits = done.stdout.splitlines()
    assert states == ["False", "False", "True"]
    assert json.loads(bits) == bits_of_products()
