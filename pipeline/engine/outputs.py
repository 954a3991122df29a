"""The tensors in what a module returns, wherever they are: the engine's hooks stand on them."""

import operator
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pipeline.errors import ConfigError

CLOSED = (type, nn.Module, ModuleType, FunctionType, MethodType, torch.dtype, torch.device)
"""Objects whose attributes are no part of what a module returns."""

PLAIN = (bool, int, float, complex, str, bytes, type(None))

Setter = Callable[[Any], None]


def tensors_in(output: object) -> Iterator[Tensor]:
    """The tensors in a module's output.

    In tuples, dictionaries, model outputs, dataclasses, and the attributes of any other object.
    """
    yield from _tensors(output, set())


def without_views(output: object) -> object:
    """A module's output with copies in place of views that autograd backpropagates through.

    A hook on a view is lost when the view is changed in place. Objects stay the same ones: what
    they hold is replaced in them.
    """
    return _without_views(output, set())


def check_open(block: str, output: object) -> None:
    """Raise where a block's tensors are out of reach: it would compute with weights that are gone.

    Raises:
        ConfigError: one sentence that names the block and the class of its output.
    """
    for leaf in tree_leaves(output):
        if isinstance(leaf, (*PLAIN, Tensor)) or any(True for _ in _parts(leaf)):
            continue
        raise ConfigError(
            f"{block} returns a {type(leaf).__qualname__}, in which the engine finds no tensor:"
            " have it return tensors, in tuples, dictionaries or an object's attributes"
        )


def _tensors(output: object, seen: set[int]) -> Iterator[Tensor]:
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif id(leaf) not in seen:
            seen.add(id(leaf))
            for part, _ in _parts(leaf):
                yield from _tensors(part, seen)


def _without_views(output: object, seen: set[int]) -> object:
    def replaced(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            is_view = leaf.requires_grad and leaf._is_view()  # noqa: SLF001
            return leaf.clone() if is_view else leaf
        if id(leaf) not in seen:
            seen.add(id(leaf))
            for part, put in _parts(leaf):
                new = _without_views(part, seen)
                if any(map(operator.is_not, tree_leaves(part), tree_leaves(new))):
                    put(new)
        return leaf

    return tree_map(replaced, output)


def _parts(leaf: object) -> Iterator[tuple[object, Setter]]:
    """What an object holds, each part with a way to replace it."""
    if isinstance(leaf, (*PLAIN, *CLOSED)):
        return
    # Subclasses of containers, which PyTorch's trees take for leaves.
    items: list[Any] = []
    if isinstance(leaf, dict):
        items = list(leaf.items())
    elif isinstance(leaf, list):
        items = list(enumerate(leaf))
    container: Any = leaf
    for key, value in items:
        yield value, lambda new, key=key: container.__setitem__(key, new)
    for name, value in _attributes(leaf):
        # As a frozen dataclass sets its own fields.
        yield value, lambda new, name=name: object.__setattr__(leaf, name, new)


def _attributes(leaf: object) -> Iterator[tuple[str, object]]:
    yield from list(getattr(leaf, "__dict__", {}).items())
    for each in type(leaf).__mro__:
        slots = each.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(leaf, name):
                yield name, getattr(leaf, name)
