"""Products of bf16 matrices on the CPU by the kernel, in place of PyTorch's own.

PyTorch's products of bf16 are several times as slow as those of fp32 where the processor has no
instructions for them. All of them end in four operators, those of autograd, of compiled code and of
models nobody has heard of with them, so the kernel takes their place with PyTorch's dispatcher, in
this process, until it is given back.
"""

import functools
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import Library

from pipeline.config import Kernels
from pipeline.kernels import choice
from pipeline.kernels.linear.cpu import order_of
from pipeline.kernels.linear.rows import fewest_rows
from pipeline.kernels.products import cpu
from pipeline.kernels.toolchain.cpp import Built, NotBuiltError

NAME = "products of bf16 matrices"

OPERATORS = ("mm", "bmm", "addmm", "baddbmm")
"""Of PyTorch; each also writes into a given tensor, as `mm.out`."""


def take_over_for(model: nn.Module, device: torch.device, kernels: Kernels) -> None:
    """`take_over`, if a model has weights in bf16 on the CPU.

    Args:
        model: of which some weights may still be in their files.
        device: where it computes.
        kernels: its setting.

    Raises:
        KernelError: kernels are required, and there is none.
    """
    if device.type == "cpu" and any(each.dtype is torch.bfloat16 for each in model.parameters()):
        take_over(kernels)


def take_over(kernels: Kernels = "auto") -> None:
    """Have the kernel compute all products of bf16 on the CPU from now on, if they are slow.

    Raises:
        KernelError: kernels are required, and there is none.
    """
    if kernels == "off" or not cpu.is_needed() or is_in_place():
        return
    built = cpu.library()
    if isinstance(built, NotBuiltError):
        choice.settle(NAME, str(built), kernels)
        return
    _PLACE.take(built)


def is_in_place() -> bool:
    """Whether the kernel computes PyTorch's products of bf16 in this process."""
    return _PLACE.library is not None


@contextmanager
def in_place() -> Iterator[None]:
    """Inside it the kernel computes them, also on a processor on which PyTorch's own are faster.

    Raises:
        NotBuiltError: there is none.
    """
    built = cpu.library()
    if isinstance(built, NotBuiltError):
        raise built
    with given_back():
        if not is_in_place():
            _PLACE.take(built)
        yield


@contextmanager
def given_back() -> Iterator[None]:
    """What takes PyTorch's place inside it gives it back at the end."""
    was_in_place = is_in_place()
    try:
        yield
    finally:
        if is_in_place() and not was_in_place:
            _PLACE.give_back()


@contextmanager
def suspended() -> Iterator[None]:
    """Inside it PyTorch's own compute them again, as without this project."""
    was_suspended, _PLACE.suspended = _PLACE.suspended, True
    try:
        yield
    finally:
        _PLACE.suspended = was_suspended


class _Place:
    """The place of PyTorch's operators in its dispatcher, which is one for the whole process."""

    def __init__(self) -> None:
        self.library: Library | None = None
        self.suspended = False

    def take(self, built: Built) -> None:
        """Put the kernel there."""
        self.library = Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*overrid")
            for name in OPERATORS:
                for overload in (name, f"{name}.out"):
                    own = torch.library.get_kernel(f"aten::{overload}", "CPU")
                    function = functools.partial(_product, name, own, built)
                    self.library.impl(overload, function, "CPU")
        _forget_orders()

    def give_back(self) -> None:
        """Put PyTorch's own there."""
        assert self.library is not None
        self.library._destroy()  # noqa: SLF001  # what PyTorch's own tests call
        self.library = None
        _forget_orders()


_PLACE = _Place()
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # noqa: SLF001


def _forget_orders() -> None:
    """Have it found out again in which order PyTorch adds up products."""
    order_of.cache_clear()
    fewest_rows.cache_clear()


def _product(
    name: str,
    own: Any,  # noqa: ANN401
    built: Built,
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> Tensor:
    """An operator by the kernel where it takes the tensors, else by PyTorch's own."""
    a, b = args[-2:]
    shift = args[0] if len(args) > 2 else None
    out = kwargs.get("out")
    is_ours = a.dtype is torch.bfloat16 and not _PLACE.suspended
    if not is_ours or not _fit(name, *args, out=out):
        return own.call_boxed(_CPU, *args, **kwargs)
    if out is None:
        out = a.new_empty(*a.shape[:-1], b.shape[-1])
    left, right, to = (each if each.ndim == 3 else each[None] for each in (a, b, out))
    left, right = (each if cpu.takes(each) else each.contiguous() for each in (left, right))
    cpu.multiply(
        left,
        right,
        None if shift is None else shift.expand(to.shape),
        to,
        alpha=float(kwargs.get("alpha", 1)),
        beta=float(kwargs.get("beta", 1)),
        built=built,
    )
    return out


def _fit(name: str, *args: Tensor, out: Tensor | None) -> bool:
    """Whether these are matrices of bf16 for the kernel; of others PyTorch says what is wrong."""
    *shift, a, b = args
    dims = 3 if name in ("bmm", "baddbmm") else 2
    if not all(_is_ours(each) for each in (*args, *([] if out is None else [out]))):
        return False
    if a.ndim != dims or b.ndim != dims or a.shape[:-2] != b.shape[:-2]:
        return False
    if a.shape[-1] != b.shape[-2] or 0 in (*a.shape, b.shape[-1]):
        return False
    shape = (*a.shape[:-1], b.shape[-1])
    if out is not None and not (out.shape == shape and out.is_contiguous() and _apart(out, args)):
        return False
    return all(_spreads(each.shape, shape) for each in shift)


def _is_ours(tensor: Tensor) -> bool:
    return (
        tensor.dtype is torch.bfloat16
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
    )


def _apart(out: Tensor, read: Iterable[Tensor]) -> bool:
    """Whether a result has memory of its own."""
    memory = out.untyped_storage().data_ptr()
    return all(memory != each.untyped_storage().data_ptr() for each in read)


def _spreads(shape: torch.Size, to: tuple[int, ...]) -> bool:
    """Whether numbers of a shape can be spread over another."""
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(one in (1, other) for one, other in pairs)
