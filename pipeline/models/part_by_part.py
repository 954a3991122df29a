"""Modules that compute their virtual parts one after the other (`pipeline.parallel.virtual_parts`).

The module's own code runs unmodified, once for each part: its parameters are those of the part,
views of this process's, and its counts of heads and widths are a part's. At the layer that is
divided by inputs a part has found what it adds to the sum, and its run ends there, but for the last
one: that goes on with the sum of all, and with the module's own parameters. So what the module does
with the sum is done once.

Where a block has such layers beside its modules, as OPT has those of its MLP, the code between them
is not run by parts: it must be element by element, as activations are.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.pytorch_utils import Conv1D

from pipeline.models.adapter_dropout import masks_of_part
from pipeline.models.quantized import LinearLayer, QuantizedLinear
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


Place = tuple[nn.Module, str]
"""A module that has a parameter, and the parameter's name there."""

Own = Tensor | ShardSpec
"""What a part has of a parameter; of a quantized weight, where that lies."""


@dataclass(frozen=True)
class DividedLayer:
    """A layer of which each part has some outputs, or some inputs."""

    module: nn.Module
    """The layer, or the adapter that it is in."""

    layer: LinearLayer

    pieces: Mapping[Place, Sequence[ShardSpec]]
    """Of each parameter that is divided, where the elements of each part of this process lie."""

    begin: Callable[[], None] | None = None
    """What is computed of all parts of a layer before the first of them runs."""

    def compute_columns(self) -> None:
        """Have what is divided by its inputs compute with those of a part, without its bias."""
        for module, _ in self.pieces:
            object.__setattr__(module, "forward", partial(_of_columns, module))


def _is_quantized(place: Place) -> bool:
    """Whether it is a weight that is no parameter."""
    module, leaf = place
    return isinstance(module, QuantizedLinear) and leaf == "weight"


def _param(place: Place) -> nn.Parameter:
    module, leaf = place
    return module.get_parameter(leaf)


class _PartEndError(Exception):
    """A part has found what it adds to the sum."""


class _Parameters:
    """The parameters of a module, in whose place those of a part can be.

    Args:
        module: that has them.
        parts: which there are.
        layers: those of its layers that are divided.
        ending: the one whose bias is added to a sum, if there is one.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: VirtualParts,
        layers: Sequence[DividedLayer],
        ending: nn.Module | None,
    ) -> None:
        self._module, self._parts, self._layers = module, parts, layers
        self._aside = None if ending is None else (ending, "bias")
        self._originals: dict[Place, nn.Parameter | None] = {}
        """The module's own, while those of a part are in their place."""

    def of_parts(self) -> list[dict[Place, Own]]:
        """What a part's run uses, of each part: parameters, and of quantized weights the pieces."""
        for each in self._layers:
            if each.begin is not None:
                each.begin()
        found: dict[Place, Sequence[Own]] = {
            place: pieces if _is_quantized(place) else cut_weight(_param(place), pieces)
            for each in self._layers
            for place, pieces in each.pieces.items()
        }
        whole = {
            (module, leaf): param
            for module in self._module.modules()
            for leaf, param in module.named_parameters(recurse=False)
            if param.requires_grad and (module, leaf) not in (*found, self._aside)
        }
        if whole:
            by_part = share_weights(list(whole.values()), self._parts)
            found |= dict(zip(whole, zip(*by_part, strict=True), strict=True))
        return [
            {place: parts[at] for place, parts in found.items()}
            for at in range(len(self._parts.own))
        ]

    def use(self, own: Mapping[Place, Own]) -> None:
        """Have the module's parameters be these, until `restore`."""
        for (module, leaf), part in own.items():
            if isinstance(part, ShardSpec):
                cast("QuantizedLinear", module).piece = part
                continue
            params: dict[str, Any] = module._parameters  # noqa: SLF001  # as functional_call does
            self._originals.setdefault((module, leaf), params[leaf])
            params[leaf] = part

    def restore(self) -> None:
        """Put the module's own back."""
        for (module, leaf), param in self._originals.items():
            module._parameters[leaf] = param  # noqa: SLF001
        self._originals.clear()
        for each in self._layers:
            if isinstance(each.layer, QuantizedLinear):
                each.layer.piece = None


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
        self._parts, self._own_heads = parts, own_heads
        ending = layers[-1]
        self._last = ending.layer
        self._params = _Parameters(module, parts, layers, self._last)
        self._found: list[Tensor] = []
        """What the parts of this pass add to the sum."""
        ending.compute_columns()
        self._plain, self._plain_end = module.forward, ending.module.forward
        object.__setattr__(module, "forward", self)
        object.__setattr__(ending.module, "forward", self._end)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """What the module gives, from the sum of all parts."""
        hidden = args[0] if args else kwargs["hidden_states"]
        given, weights = feed_parts(hidden, self._parts), self._params.of_parts()
        others = [_without_cache(each) for each in args[1:]]
        rest = {name: _without_cache(each) for name, each in kwargs.items()}
        try:
            for at, (number, values, own) in enumerate(
                zip(self._parts.own, given, weights, strict=True)
            ):
                self._params.use(own)
                named = rest if self._own_heads is None else self._own_heads(number, rest)
                with suppress(_PartEndError), masks_of_part(at):
                    if args:
                        return self._plain(values, *others, **named)
                    return self._plain(**{**named, "hidden_states": values})
        finally:
            self._found.clear()
            self._params.restore()
        raise AssertionError("the last part ends with the module")

    def _end(self, values: Float[Tensor, "*B n"]) -> Float[Tensor, "*B m"]:
        """The forward pass of the last layer: a part's end, or the sum of all."""
        self._found.append(self._plain_end(values))
        if len(self._found) < len(self._parts.own):
            raise _PartEndError
        self._params.restore()
        return _total(self._found, self._parts, self._last)


class _Pair:
    """Two layers of a block itself: the second reads what an activation makes of the first.

    They compute part by part, and join what they find for the code between them.
    """

    def __init__(self, parts: VirtualParts, first: DividedLayer, second: DividedLayer) -> None:
        self._parts, self._last = parts, second.layer
        self._of_first = _Parameters(first.module, parts, [first], None)
        self._of_second = _Parameters(second.module, parts, [second], second.layer)
        second.compute_columns()
        self._first, self._second = first.module.forward, second.module.forward
        object.__setattr__(first.module, "forward", self._begin)
        object.__setattr__(second.module, "forward", self._end)

    def _begin(self, values: Float[Tensor, "*B n"]) -> Float[Tensor, "*B m"]:
        given = feed_parts(values, self._parts)
        return torch.cat(_each(self._first, given, self._of_first), dim=-1)

    def _end(self, values: Float[Tensor, "*B n"]) -> Float[Tensor, "*B m"]:
        given = split_columns(values, self._parts)
        found = _each(self._second, given, self._of_second)
        return _total(found, self._parts, self._last)


def _each(
    forward: Callable[[Tensor], Tensor], given: Sequence[Tensor], params: _Parameters
) -> list[Tensor]:
    """What a layer gives with the parameters of each part."""
    found: list[Tensor] = []
    try:
        for at, (values, own) in enumerate(zip(given, params.of_parts(), strict=True)):
            params.use(own)
            with masks_of_part(at):
                found.append(forward(values))
    finally:
        params.restore()
    return found


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


def product(layer: LinearLayer, values: Float[Tensor, "*B n"]) -> Float[Tensor, "*B m"]:
    """What a layer computes without its bias."""
    if isinstance(layer, QuantizedLinear):
        return layer.product(values)
    return values @ layer.weight if isinstance(layer, Conv1D) else F.linear(values, layer.weight)


def _of_columns(module: nn.Module, values: Float[Tensor, "*B n"]) -> Float[Tensor, "*B m"]:
    if isinstance(module, QuantizedLinear):
        return module.product(values)
    weight = cast("Tensor", module.weight)
    return ending_product(values, weight, is_turned=isinstance(module, Conv1D))


def _total(found: Sequence[Tensor], parts: VirtualParts, layer: LinearLayer) -> Tensor:
    """The sum of all parts, and the layer's bias once."""
    added = add_parts(found, parts)
    return added if layer.bias is None else added + layer.bias


def _without_cache(argument: object) -> object:
    """What a part is given: keys of one part are none for the next to see."""
    return None if isinstance(argument, Cache) else argument
