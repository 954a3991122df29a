"""How many bytes a model's own code takes to run, found by running it on tensors without memory.

Every operation runs on the meta device, shapes alone; each storage that it would make is counted
until the last reference to it is gone, those of autograd included. So every family is counted by
what it does, recomputation and frozen weights with it.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.engine.zero import in_backward
from pipeline.kernels.build import has_avx512, multiplies_bf16

PRODUCTS = ("mm", "addmm", "bmm")
"""Operations that a matrix product ends in."""

JOINS = ("cat", "empty_like")
"""Operations by which the products of several processes become one, as where each has the logits of
some words: what the others have is an empty tensor here."""


def widens_products() -> bool:
    """Whether products of bf16 matrices are computed in fp32 memory of their own on this machine.

    oneDNN does so on processors with AVX-512 that have no instructions for bf16.
    """
    return has_avx512() and not multiplies_bf16()


@dataclass(frozen=True)
class PassBytes:
    """What one pass takes beside weights and their gradients."""

    kept: int
    """When the blocks have been gone through: what the way back needs, or what is left."""

    blocks: int
    """At the highest moment in which a block is at work."""

    head: int
    """At the highest moment between, with logits and what is computed of them."""

    tail: int
    """At the highest moment from which only the first block and the embeddings are to go."""

    waits: int
    """Between the forward pass and the backward pass, logits included."""

    @property
    def peak(self) -> int:
        """Bytes at the highest moment of all."""
        return max(self.blocks, self.head)

    def beside(self, others: int) -> "PassBytes":
        """While there are so many bytes of others."""
        return PassBytes(*(others + each for each in astuple(self)))

    def plus(self, times: int, more: "PassBytes") -> "PassBytes":
        """With that many times what `more` has more than this; the tail is that of `more`."""

        def added(one: int, other: int) -> int:
            return one + times * (other - one)

        return PassBytes(
            added(self.kept, more.kept),
            added(self.blocks, more.blocks),
            added(self.head, more.head),
            more.tail,
            added(self.waits, more.waits),
        )


class ActivationProfiler(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, while they are alive.

    With `on_cpu` also what this machine's processor takes inside them.
    """

    def __init__(self, *, on_cpu: bool = False) -> None:
        super().__init__()
        self._widens = on_cpu and widens_products()
        self.held = 0
        self.peaks = [0]
        """Most that was held, in each stretch of the work; the last one goes on."""
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._products: set[int] = set()
        """Storages that hold what a matrix product gave, and nothing has been done with since."""

    def ignore(self, tensors: Iterable[Tensor | None]) -> None:
        """Leave these out of the count, as weights."""
        for tensor in tensors:
            if tensor is not None:
                self._add(tensor.untyped_storage(), num_bytes=0)

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run the operation, and count what it has made."""
        if func is torch.ops.aten.equal.default:
            return self._are_equal(*args)
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                is_new = self._add(storage, num_bytes=storage.nbytes())
                if is_new and (name in PRODUCTS or self._joins_products(name, args)):
                    self._products.add(id(storage))
                elif not is_new and name.endswith("_") and not name.startswith("_"):
                    self._products.discard(id(storage))
        if self._widens and name in PRODUCTS and result.dtype == torch.bfloat16:
            self._note(4 * result.numel())
        return result

    def _are_equal(self, one: Tensor, other: Tensor) -> bool:
        """Whether both are the same memory, or fresh from a matrix product.

        The first is what a loss asks that weighs all alike, the second what a model's logits are
        asked: those that a family scales or caps are not fresh.
        """
        keys = {id(each.untyped_storage()) for each in (one, other)}
        return len(keys) == 1 or keys <= self._products

    def _joins_products(self, name: str, args: tuple[Any, ...]) -> bool:
        """Whether an operation puts nothing but products together."""
        parts = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        keys = {id(each.untyped_storage()) for each in parts}
        return name in JOINS and len(keys) > 0 and keys <= self._products

    def _add(self, storage: torch.UntypedStorage, *, num_bytes: int) -> bool:
        """Count a storage; whether it is new."""
        key = id(storage)
        if key in self._known:
            return False
        self._known[key] = weakref.ref(storage, partial(self._forget, key, num_bytes))
        self.held += num_bytes
        self._note()
        return True

    def _forget(self, key: int, num_bytes: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        """Take a storage that has died out of the count."""
        self.held -= num_bytes
        del self._known[key]
        self._products.discard(key)

    @property
    def peak(self) -> int:
        """Most that was held."""
        return max(self.peaks)

    def begin_stretch(self) -> None:
        """Note the highest moment from now on by itself."""
        self.peaks.append(self.held)

    def _note(self, more: int = 0) -> None:
        self.peaks[-1] = max(self.peaks[-1], self.held + more)


class _Fused(torch.autograd.Function):
    """Fused attention: it keeps its inputs, its output, and the logarithm of each row's sum.

    Its output lies token after token, whatever the order of its dimensions.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: ANN401
        batch, heads, tokens = query.shape[:-1]
        out = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(batch, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401, ARG004
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _FusedAttention(TorchFunctionMode):
    """Attention by a fused kernel, as devices have it; the meta device has none."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run anything else as it is."""
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = _heads(*args, **(kwargs or {}))
        return _Fused.apply(query, key, value)


def _heads(
    query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
) -> tuple[Tensor, Tensor, Tensor]:
    return query, key, value


def _again(part: nn.Module) -> Iterator[RemovableHandle]:
    """Have a part of a block see fused attention when autograd, without modes, recomputes it."""
    modes: list[_FusedAttention] = []

    def enter(*_: object) -> None:
        if in_backward():
            modes.append(_FusedAttention())
            modes[-1].__enter__()

    def leave(*_: object) -> None:
        if modes:
            modes.pop().__exit__(None, None, None)

    yield part.register_forward_pre_hook(enter)
    yield part.register_forward_hook(leave, always_call=True)  # it is broken off when it has all


@contextmanager
def profiled(model: nn.Module, *, on_cpu: bool = False) -> Iterator[ActivationProfiler]:
    """Count all but the model's own parameters, their gradients and its buffers."""
    profiler = ActivationProfiler(on_cpu=on_cpu)
    params = list(model.parameters())
    profiler.ignore([*params, *(param.grad for param in params), *model.buffers()])
    with ExitStack() as stack:
        stack.enter_context(_FusedAttention())
        stack.enter_context(profiler)
        yield profiler


def measure_pass(
    model: nn.Module,
    run: Callable[[], Tensor],
    *,
    first: nn.Module,
    last: nn.Module,
    trains: bool,
    narrow: bool = False,
    on_cpu: bool = False,
    beside: Sequence[Tensor] = (),
) -> PassBytes:
    """Bytes of a forward pass and, if it `trains`, of the backward pass.

    Args:
        model: on the meta device.
        run: the forward pass; returns the loss, or hidden states, of which a gradient comes then.
        first: the first block.
        last: the last block.
        trains: whether gradients are found. Those of weights are added to buffers that are not
            counted.
        narrow: whether these are of the weights' own types rather than fp32.
        on_cpu: whether a processor computes.
        beside: weights that are no parameters; gradients of these are counted.
    """
    params = [param for param in model.parameters() if param.requires_grad and trains]
    _give_buffers(params, narrow=narrow)
    kept = head = 0
    with profiled(model, on_cpu=on_cpu) as profiler, torch.set_grad_enabled(trains):
        profiler.ignore(beside)

        def head_begins(*_: object) -> None:
            nonlocal kept, head
            if not in_backward():
                profiler.begin_stretch()
                kept, head = profiler.held, len(profiler.peaks) - 1

        hooks = [last.register_forward_hook(head_begins)]
        try:
            # In the backward pass the head ends with the last block, and the first block is last.
            ends = (last, first) if trains else ()
            hooks += [each.register_forward_hook(_on_the_way_back(profiler)) for each in ends]
            for block in model.modules():
                if isinstance(block, GradientCheckpointingLayer):
                    hooks += [hook for part in block.children() for hook in _again(part)]
            found = run()
            waits = profiler.held
            if trains:
                gradient = None if found.ndim == 0 else torch.empty_like(found)
                # Not its method, inside which modes are off.
                torch.autograd.backward(found, gradient)
        finally:
            for hook in hooks:
                hook.remove()
            for each in (*params, *beside):
                each.grad = None
    blocks = [peak for index, peak in enumerate(profiler.peaks) if index != head]
    tail = profiler.peaks[-1] if trains else 0
    return PassBytes(kept, max(blocks), profiler.peaks[head], tail, waits)


def _give_buffers(params: Iterable[nn.Parameter], *, narrow: bool) -> None:
    """Have buffers that gradients are added to."""
    for param in params:
        dtype = param.dtype if narrow else torch.float32
        param.grad_dtype = dtype  # pyright: ignore[reportAttributeAccessIssue]
        param.grad = torch.empty_like(param, dtype=dtype)


def _on_the_way_back(profiler: ActivationProfiler) -> Callable[..., None]:
    """A hook on a block: a stretch begins with the gradient of its output."""

    def after(_module: nn.Module, _args: object, output: object) -> None:
        for each in tree_leaves(output):
            if isinstance(each, Tensor) and each.requires_grad and not in_backward():
                each.register_hook(lambda _: profiler.begin_stretch())
                return

    return after
