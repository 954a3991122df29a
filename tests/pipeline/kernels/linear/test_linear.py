"""Linear layers of few rows: the bits of PyTorch's products of many, whatever is beside a row."""

import itertools
import logging

import pytest
import torch
import torch.nn.functional as F

from pipeline.errors import KernelError
from pipeline.kernels import choice
from pipeline.kernels.choice import SWITCH
from pipeline.kernels.linear import cpu
from pipeline.kernels.linear.cpu import (
    MOST_ROWS,
    Linear,
    Order,
    library,
    order_of,
    orders,
    probe,
)
from pipeline.kernels.linear.dispatch import prepare
from pipeline.kernels.toolchain.cpp import Built

DTYPES = (torch.float32, torch.bfloat16)
SIZES = ((48, 32), (102, 100), (288, 96), (290, 33), (768, 288), (1030, 64), (1030, 400))
"""Inputs and outputs: more and fewer than a block, whole panels and others."""

COUNTS = (1, 3, 7, 12, 13, 30, 64)
"""As many as go through together, fewer, and several times as many, evenly and not."""


def known(dtype: torch.dtype, inputs: int, outputs: int = 96, *, turned: bool = False) -> None:
    """Skip where the machine adds up in an order of its own; there PyTorch does the work."""
    assert isinstance(library(dtype), Built), "the kernel can't be had on this machine"
    if order_of(dtype, inputs, outputs, turned=turned) is None:
        pytest.skip(f"PyTorch's order of {inputs} products is not known")


def prepared(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[Linear, torch.Tensor]:
    out = torch.full((len(x), len(weight)), torch.nan, dtype=x.dtype)
    found = prepare(x, weight, bias, out)
    assert found is not None
    return found, out


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_any_rows_have_the_bits_of_products_of_many(
    dtype: torch.dtype, inputs: int, outputs: int, *, turned: bool
) -> None:
    known(dtype, inputs, outputs, turned=turned)
    # An order of addition that is not PyTorch's shows in them, even after rounding.
    x, weight, bias = (tensor.to(dtype) for tensor in probe(inputs, outputs))

    for rows, shift in itertools.product(COUNTS, (None, bias)):
        matrix = weight.T.contiguous().T if turned else weight
        if turned and shift is not None:  # as GPT-2 has it
            expected = torch.addmm(shift, x, matrix.T)[:rows]
        else:
            expected = F.linear(x, matrix, shift)[:rows]

        found, out = prepared(x[:rows].contiguous(), matrix, shift)
        found()

        assert torch.equal(out, expected), (rows, shift is None)


@pytest.mark.parametrize(("inputs", "outputs"), [*SIZES, (1500, 40)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_in_every_order_are_those_of_float64(
    dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    """Whether or not PyTorch on this machine has one of these orders."""
    built = library(dtype)
    assert isinstance(built, Built)
    generator = torch.Generator().manual_seed(outputs)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((13, inputs), (outputs, inputs), (outputs,))
    )

    for order, shift, turned in itertools.product(
        orders(dtype, inputs), (None, bias), (False, True)
    ):
        out = torch.full((13, outputs), torch.nan, dtype=dtype)
        matrix = weight.T.contiguous().T if turned else weight
        cpu.make(built, order, x, matrix, shift, out)()

        terms = x.double(), weight.double(), None if shift is None else shift.double()
        exact = F.linear(*terms)
        # Four units of fp32 of all that is added up, and what rounding to bf16 adds.
        allowed = 2**-22 * F.linear(*(None if each is None else each.abs() for each in terms))
        if dtype == torch.bfloat16:
            allowed += 2**-8 * exact.abs()
        assert ((out.double() - exact).abs() <= allowed).all(), (order, shift is None, turned)


def test_other_orders_of_addition_give_other_bits() -> None:
    known(torch.float32, 768)
    x, weight, _ = probe(768)
    found, out = prepared(x, weight)
    right = order_of(torch.float32, 768)
    assert right is not None

    for block in sorted({768, 384, 256, 100} - {right.block}):
        cpu.make(found.built, Order(block, bias_first=True), x, weight, None, out)()

        assert not torch.equal(out, F.linear(x, weight))


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_only_the_rows_that_count_are_computed(dtype: torch.dtype, count: int) -> None:
    known(dtype, 48)
    x, weight = torch.randn(8, 48).to(dtype), torch.randn(40, 48).to(dtype)
    found, out = prepared(x, weight)

    found.take(count)
    found()

    assert out[:count].isfinite().all()
    assert out[count:].isnan().all()


def test_more_rows_than_there_are_are_refused() -> None:
    known(torch.float32, 48)
    found, _ = prepared(torch.randn(8, 48), torch.randn(40, 48))

    for rows in (9, -1):
        with pytest.raises(ValueError, match=f"made for 8 rows, not {rows}"):
            found.take(rows)


def test_the_number_of_threads_changes_no_bit() -> None:
    known(torch.float32, 288)
    x, weight = torch.randn(5, 288), torch.randn(1000, 288)
    found, out = prepared(x, weight)
    results: list[torch.Tensor] = []
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found()
            results.append(out.clone())
    finally:
        torch.set_num_threads(threads)

    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_nan_and_infinity_go_through() -> None:
    known(torch.bfloat16, 48)
    x, weight = torch.ones(2, 48).bfloat16(), torch.ones(32, 48).bfloat16()
    weight[3, 5], weight[4, 6] = torch.nan, torch.inf
    found, out = prepared(x, weight)

    found()

    assert out[:, 3].isnan().all()
    assert out[:, 4].isposinf().all()
    assert (out[:, 5] == 48).all()


ROWS, WEIGHT = torch.randn(4, 48), torch.randn(32, 48)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "out"),
    [
        (ROWS.half(), WEIGHT.half(), None, torch.empty(4, 32).half()),
        (ROWS.double(), WEIGHT.double(), None, torch.empty(4, 32).double()),
        (ROWS, WEIGHT.bfloat16(), None, torch.empty(4, 32)),
        (ROWS, WEIGHT, torch.zeros(32).bfloat16(), torch.empty(4, 32)),
        (ROWS, WEIGHT, torch.zeros(4, 32), torch.empty(4, 32)),
        (ROWS, WEIGHT, torch.zeros(1), torch.empty(4, 32)),
        (ROWS, WEIGHT, None, torch.empty(2, 64)),
        (torch.randn(48), WEIGHT, None, torch.empty(32)),
        (ROWS.T.contiguous().T, WEIGHT, None, torch.empty(4, 32)),
        (torch.randn(4, 24), WEIGHT[:, ::2], None, torch.empty(4, 32)),
        (ROWS, WEIGHT[:8], None, torch.empty(4, 8)),
        (ROWS, WEIGHT, None, torch.empty(4, 64)[:, ::2]),
        (torch.randn(MOST_ROWS + 1, 48), WEIGHT, None, torch.empty(MOST_ROWS + 1, 32)),
        (torch.empty(0, 48), WEIGHT, None, torch.empty(0, 32)),
        (torch.empty(4, 0), torch.empty(32, 0), None, torch.empty(4, 32)),
        (
            torch.ones(4, 47).bfloat16(),
            torch.ones(32, 47).bfloat16(),
            None,
            WEIGHT[:4, :32].bfloat16(),
        ),
        (ROWS.to("meta"), WEIGHT.to("meta"), None, torch.empty(4, 32, device="meta")),
    ],
)
def test_what_it_does_not_take_is_left_to_pytorch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    assert prepare(x, weight, bias, out) is None


def test_that_there_is_no_kernel_is_said_once_or_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choice._say_once.cache_clear()
    x, weight, out = ROWS.half(), WEIGHT.half(), torch.empty(4, 32).half()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert prepare(x, weight, None, out) is None
    assert [record.message for record in caplog.records] == [
        "PyTorch does the work of the kernel of linear layers: it is written for fp32 and bf16,"
        " not torch.float16"
    ]

    monkeypatch.setenv(SWITCH, "required")
    with pytest.raises(KernelError, match="of linear layers can't be had: it is written for fp32"):
        prepare(x, weight, None, out)


def test_products_that_are_no_linear_layer_of_few_rows_are_nothing_to_miss(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(SWITCH, "required")
    many = torch.randn(MOST_ROWS + 1, 48)
    with caplog.at_level(logging.INFO):
        assert prepare(many, WEIGHT, None, torch.empty(len(many), 32)) is None
        assert prepare(ROWS, WEIGHT, torch.zeros(4, 32), torch.empty(4, 32)) is None  # a residual

    assert not caplog.records


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    known(torch.float32, 48)
    monkeypatch.setenv(SWITCH, "off")

    assert prepare(ROWS, WEIGHT, None, torch.empty(4, 32)) is None
