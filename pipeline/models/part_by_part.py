"""Modules that compute their virtual parts one after the other (`pipeline.parallel.virtual_parts`).

The module's own code runs unmodified, once for each part: its parameters are those of the part,
views of this process's, and its counts of heads and widths are a part's. At the layer that is
divided by inputs a part has found what it adds to the sum, and its run ends there, but for the last
one: that goes on with the sum of all, and with the module's own parameters. So what the module does
with the sum is done once.

Where a block has such layers beside its modules, as OPT has those of its MLP, the code between them
is not run by parts: it must be element by element, as activations are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.pytorch_utils import Conv1D

from pipeline.parallel.shards import ShardSpec
from pipeline.parallel.virtual_parts import (
    VirtualParts,
    add_parts,
    cut_weight,
    ending_product,
    feed_parts,
    share_weights,
    split_columns,
)

OwnHeads = Callable[[int, dict[str, Any]], dict[str, Any]]
"""Narrows a module's keyword arguments to the heads of a part."""


@dataclass(frozen=True)
class DividedLayer:
    """A layer of which each part has some outputs, or some inputs."""

    layer: nn.Linear | Conv1D

    pieces: Mapping[str, Sequence[ShardSpec]]
    """Of each parameter that is divided, where the elements of each part of this process lie."""

    def parameters(self) -> dict[str, tuple[Tensor, ...]]:
        """Those that are divided, of each part."""
        return {
            leaf: cut_weight(self.layer.get_parameter(leaf), each)
            for leaf, each in self.pieces.items()
        }


class _PartEndError(Exception):
    """A part has found what it adds to the sum."""


class PartByPart:
    """The forward pass of a module, which it replaces.

    Args:
        module: with its counts of heads and widths set to a part's.
        parts: which there are.
        layers: those that are divided, the last of them by its inputs.
        own_heads: where the family needs it.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: VirtualParts,
        layers: Sequence[DividedLayer],
        own_heads: OwnHeads | None,
    ) -> None:
        self._module, self._parts, self._layers = module, parts, layers
        self._own_heads = own_heads
        self._plain = module.forward
        self._last = layers[-1].layer
        self._is_turned = isinstance(self._last, Conv1D)
        self._found: list[Tensor] = []
        """What the parts of this pass add to the sum."""
        self._originals: dict[tuple[nn.Module, str], nn.Parameter | None] = {}
        """The module's own parameters, while those of a part are in their place."""
        object.__setattr__(module, "forward", self)
        object.__setattr__(self._last, "forward", self._end)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """What the module gives, from the sum of all parts."""
        hidden = args[0] if args else kwargs["hidden_states"]
        given, weights = feed_parts(hidden, self._parts), self._weights()
        others = [_without_cache(each) for each in args[1:]]
        rest = {name: _without_cache(each) for name, each in kwargs.items()}
        try:
            for number, values, own in zip(self._parts.own, given, weights, strict=True):
                self._use(own)
                named = rest if self._own_heads is None else self._own_heads(number, rest)
                try:
                    if args:
                        return self._plain(values, *others, **named)
                    return self._plain(**{**named, "hidden_states": values})
                except _PartEndError:
                    continue
        finally:
            self._found.clear()
            self._restore()
        raise AssertionError("the last part ends with the module")

    def _end(self, values: Float[Tensor, "*B n"]) -> Float[Tensor, "*B m"]:
        """The forward pass of the last layer: a part's end, or the sum of all."""
        self._found.append(ending_product(values, self._last.weight, is_turned=self._is_turned))
        if len(self._found) < len(self._parts.own):
            raise _PartEndError
        self._restore()
        return total(self._found, self._parts, self._last)

    def _weights(self) -> list[dict[tuple[nn.Module, str], Tensor]]:
        """Of each part the parameters that its run uses."""
        found: dict[tuple[nn.Module, str], tuple[Tensor, ...]] = {}
        for each in self._layers:
            found |= {(each.layer, leaf): parts for leaf, parts in each.parameters().items()}
        whole = {
            place: param
            for place, param in _parameters(self._module)
            if place not in found and place != (self._last, "bias") and param.requires_grad
        }
        if whole:
            by_part = share_weights(list(whole.values()), self._parts)
            found |= dict(zip(whole, zip(*by_part, strict=True), strict=True))
        return [
            {place: parts[at] for place, parts in found.items()}
            for at in range(len(self._parts.own))
        ]

    def _use(self, own: Mapping[tuple[nn.Module, str], Tensor]) -> None:
        """Have the module's parameters be these."""
        for (module, leaf), tensor in own.items():
            params: dict[str, Any] = module._parameters  # noqa: SLF001  # as functional_call does
            self._originals.setdefault((module, leaf), params[leaf])
            params[leaf] = tensor

    def _restore(self) -> None:
        for (module, leaf), param in self._originals.items():
            module._parameters[leaf] = param  # noqa: SLF001
        self._originals.clear()


class _Pair:
    """Two layers of a block itself: the second reads what an activation makes of the first.

    They compute part by part, and join what they find for the code between them.
    """

    def __init__(self, parts: VirtualParts, first: DividedLayer, second: DividedLayer) -> None:
        self._parts, self._first, self._second = parts, first, second
        object.__setattr__(first.layer, "forward", self._begin)
        object.__setattr__(second.layer, "forward", self._end)

    def _begin(self, values: Float[Tensor, "*B n"]) -> Float[Tensor, "*B m"]:
        given, own = feed_parts(values, self._parts), self._first.parameters()
        biases = own.get("bias", (None,) * len(given))
        of_parts = zip(given, own["weight"], biases, strict=True)
        return torch.cat(
            [product(self._first.layer, each, weight, bias) for each, weight, bias in of_parts],
            dim=-1,
        )

    def _end(self, values: Float[Tensor, "*B n"]) -> Float[Tensor, "*B m"]:
        layer, own = self._second.layer, self._second.parameters()
        of_parts = zip(split_columns(values, self._parts), own["weight"], strict=True)
        is_turned = isinstance(layer, Conv1D)
        found = [ending_product(*each, is_turned=is_turned) for each in of_parts]
        return total(found, self._parts, layer)


def compute_by_parts(
    module: nn.Module,
    parts: VirtualParts,
    layers: Sequence[DividedLayer],
    *,
    is_block: bool,
    own_heads: OwnHeads | None = None,
) -> None:
    """Have a module compute its part of each layer part by part.

    Args:
        module: with its counts of heads and widths set to a part's.
        parts: which there are.
        layers: those that are divided, the last of them by its inputs.
        is_block: whether the module has more than these layers and what is between them.
        own_heads: where the family needs it.
    """
    if is_block:
        first, second = layers
        _Pair(parts, first, second)
    else:
        PartByPart(module, parts, layers, own_heads)


def sum_of_columns(
    layer: nn.Linear | Conv1D, parts: VirtualParts, values: Float[Tensor, "*B n"]
) -> Float[Tensor, "*B m"]:
    """What a layer gives, as the sum of the parts of its inputs, without a graph.

    Where this process has one part alone nothing is moved.
    """
    count, is_turned = len(parts.own), isinstance(layer, Conv1D)
    weights = layer.weight.chunk(count, dim=0 if is_turned else 1)
    own = [weight.contiguous() for weight in weights]
    read = [each.contiguous() for each in values.chunk(count, dim=-1)]
    found = [
        F.linear(each, weight.t() if is_turned else weight)
        for each, weight in zip(read, own, strict=True)
    ]
    added = parts.total(found, "hidden states")
    return added if layer.bias is None else added + layer.bias


def product(
    layer: nn.Linear | Conv1D, values: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """What a layer computes with these weights."""
    if not isinstance(layer, Conv1D):
        return F.linear(values, weight, bias)
    found = values @ weight
    return found if bias is None else found + bias


def total(found: Sequence[Tensor], parts: VirtualParts, layer: nn.Linear | Conv1D) -> Tensor:
    """The sum of all parts, and the layer's bias once."""
    added = add_parts(found, parts)
    return added if layer.bias is None else added + layer.bias


def _without_cache(argument: object) -> object:
    """What a part is given: keys of one part are none for the next to see."""
    return None if isinstance(argument, Cache) else argument


def _parameters(module: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], nn.Parameter]]:
    """Each parameter, with the module that has it and its name there."""
    for each in module.modules():
        for leaf, param in each.named_parameters(recurse=False):
            yield (each, leaf), param
