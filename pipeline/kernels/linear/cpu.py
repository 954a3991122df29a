"""The call of `cpu.cpp`, and in which order PyTorch adds up products on this machine."""

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.kernels.toolchain.cpp import FUSED, NUMBERS, Built, NotBuiltError, found
from pipeline.kernels.toolchain.levels import bf16_flags
from pipeline.kernels.toolchain.threads import parallel

SOURCE = Path(__file__).with_name("cpu.cpp")

MOST_ROWS = 64
"""More take so much arithmetic that the libraries under PyTorch are as fast."""

FEWEST_OUTPUTS = 16
"""Outputs from which the kernel is used: with fewer those libraries add up in other ways."""

PROBE_ROWS = 64
PROBE_OUTPUTS = 96
MOST_PROBED = 512
"""Outputs beyond which an order does not depend on how many there are."""


class Product(ctypes.Structure):
    """One product; the source has the same structure."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "block")),
        *((name, ctypes.c_int32) for name in ("turned", "bias_first", "halves")),
    ]


@dataclass(frozen=True)
class Order:
    """The order in which the products of an output are added up."""

    block: int
    """So many neighbouring inputs are added up by themselves."""

    bias_first: bool
    """The sum over blocks begins with the bias; else it ends with it."""

    halves: bool = False
    """Inputs that are left, more than a block and less than two, are cut in halves."""


@dataclass(frozen=True)
class Linear:
    """A linear layer that can be called as often as one likes, on the memory it was made for."""

    built: Built
    product: Product
    rows: int
    """Of x and of the result: that many there are."""

    tensors: tuple[Tensor, ...]
    """They keep the memory that `product` points to."""

    def take(self, rows: int) -> None:
        """Compute only the first `rows` rows from now on.

        Raises:
            ValueError: there are fewer.
        """
        if not 0 <= rows <= self.rows:
            raise ValueError(f"this linear layer was made for {self.rows} rows, not {rows}")
        self.product.rows = rows

    def __call__(self) -> None:
        """Write the product of what the memory holds now."""
        self.built.library.linear(
            ctypes.byref(self.product), parallel(), ctypes.c_int32(torch.get_num_threads())
        )


def kernel(
    dtype: torch.dtype, inputs: int, outputs: int, *, turned: bool = False
) -> tuple[Built, Order] | str:
    """The kernel for products of that many inputs and PyTorch's order, or why there is none.

    The reason is a clause. A turned weight is the transpose of a contiguous one, as in GPT-2.
    """
    built = library(dtype)
    order = order_of(dtype, inputs, min(outputs, MOST_PROBED), turned=turned)
    if isinstance(built, NotBuiltError):
        return str(built)
    if order is None:
        return f"PyTorch adds up {inputs} products in another order on this machine"
    return built, order


def make(
    built: Built,
    order: Order,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
) -> Linear:
    """The call in this order, without a look at the tensors."""
    rows = x.numel() // x.shape[-1]
    product = Product(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        rows=rows,
        inputs=x.shape[-1],
        outputs=weight.shape[0],
        block=order.block,
        turned=not weight.is_contiguous(),
        bias_first=order.bias_first,
        halves=order.halves,
    )
    kept = (x, weight, out) if bias is None else (x, weight, out, bias)
    return Linear(built, product, rows, kept)


@functools.cache
def library(dtype: torch.dtype) -> Built | NotBuiltError:
    """The kernel for this number format, or why it can't be had; found out once in a process."""
    return found(SOURCE, {"NUMBER": NUMBERS[dtype]}, FUSED, optional=bf16_flags())


@functools.cache
def order_of(
    dtype: torch.dtype, inputs: int, outputs: int = PROBE_OUTPUTS, *, turned: bool = False
) -> Order | None:
    """The order in which PyTorch adds up that many products here, or None if it is none we know.

    Asked of PyTorch itself: products of `probe` come out otherwise in every other order.
    """
    built = library(dtype)
    if isinstance(built, NotBuiltError):
        return None
    with torch.device("cpu"):  # another may be the default
        x, weight, bias = (tensor.to(dtype) for tensor in probe(inputs, outputs))
    if turned:
        weight = weight.T.contiguous().T
    with torch.inference_mode():
        expected = [
            torch.addmm(bias, x, weight.T) if turned else F.linear(x, weight, bias),
            F.linear(x, weight),
        ]
    out = torch.empty_like(expected[0])
    for order in orders(dtype, inputs):
        for each, result in zip((bias, None), expected, strict=True):
            make(built, order, x, weight, each, out)()
            if not torch.equal(out, result):
                break
        else:
            return order
    return None


def orders(dtype: torch.dtype, inputs: int) -> Iterator[Order]:
    """The orders in which libraries add up, as far as known."""
    unit = 4 // dtype.itemsize
    for bias_first in (True, False):
        blocks = (inputs, inputs // 2, 192, 512, 1024, 256, 384, 128, 2048, 4096)
        for block in dict.fromkeys(each for each in blocks if 0 < each <= inputs):
            if block % unit == 0:
                yield Order(block, bias_first)
        if inputs > HALVED:
            yield Order(HALVED, bias_first, halves=True)


HALVED = 384
"""Inputs of a block of MKL's on a processor with AVX-512 but without instructions for bf16."""


def probe(inputs: int, outputs: int = PROBE_OUTPUTS) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias whose products depend on the order of addition, even rounded to 8 bits.

    Half of the inputs come in pairs whose products are large and cancel each other: what is added
    between the two is rounded off more or less, as the order has it.
    """
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(PROBE_ROWS, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator)
    pairs = inputs // 4
    first, second = torch.randperm(inputs, generator=generator)[: 2 * pairs].view(2, pairs)
    large = 2.0 ** torch.randint(8, 22, (PROBE_ROWS, pairs), generator=generator)
    x[:, first] = x[:, second] = large
    weight[:, second] = -weight[:, first]
    return x, weight, bias
