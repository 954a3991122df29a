"""Cutting a model into units: what is gathered, reduced and freed together.

A unit is a transformer block; what lies outside the blocks - embeddings, final norm, heads - is the
root unit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.errors import ConfigError

ROOT = "root"
"""Name of the unit that holds what no block does."""

Kind = Literal["block", "embedding", "head", "root"]
"""Kind of a unit; a model has many blocks, and at most one unit of each other kind."""


@dataclass(frozen=True)
class UnitParams:
    """The parameters that one unit owns."""

    name: str
    module: nn.Module
    params: dict[str, nn.Parameter]
    """By their full name in the model; a tied parameter stands under its first name alone."""

    beside_blocks: bool = False
    """Whether it is what lies outside of blocks that there are."""

    kind: Kind = "block"


def find_units(model: nn.Module, classes: Sequence[str] = ()) -> list[UnitParams]:
    """The units of `model` in the order of its modules, the root unit last.

    Blocks are the modules of the named classes; without names the layers that `transformers` itself
    can checkpoint, else the entries of the longest `nn.ModuleList` of one class. Blocks don't nest:
    the outermost counts. A parameter that a block shares with anything outside belongs to the root.

    Raises:
        ConfigError: the model has no module of a named class.
    """
    blocks = _outermost(model, _blocks(model, classes))
    # By all their names: what is reached from outside of a block as well can't be freed with it.
    of_block = {id(block): name for name, block in blocks.items()}
    prefixes = {
        f"{name}.": of_block[id(module)]
        for name, module in model.named_modules(remove_duplicate=False)
        if id(module) in of_block
    }
    places: dict[nn.Parameter, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        heads = (name[: dot + 1] for dot, sign in enumerate(name) if sign == ".")
        owner = next((prefixes[head] for head in heads if head in prefixes), ROOT)
        places.setdefault(param, set()).add(owner)
    units: list[UnitParams] = []
    owned: set[nn.Parameter] = set()
    for name, block in blocks.items():
        params = {
            f"{name}.{leaf}": param
            for leaf, param in block.named_parameters()
            if places[param] == {name}
        }
        if params:
            units.append(UnitParams(name, block, params))
            owned |= set(params.values())
    rest = {name: param for name, param in model.named_parameters() if param not in owned}
    return [*units, UnitParams(ROOT, model, rest, beside_blocks=bool(units), kind="root")]


def _blocks(model: nn.Module, classes: Sequence[str]) -> dict[str, nn.Module]:
    named = dict(model.named_modules())
    named.pop("")
    if classes:
        found = {name: each for name, each in named.items() if type(each).__name__ in classes}
        missing = sorted(set(classes) - {type(each).__name__ for each in found.values()})
        if missing:
            raise ConfigError(
                f"zero.unit_classes: the model has no module of class {', '.join(missing)}"
            )
        return found
    layers: dict[str, nn.Module] = {
        name: each for name, each in named.items() if isinstance(each, GradientCheckpointingLayer)
    }
    return layers or _longest_list(named)


def _longest_list(named: dict[str, nn.Module]) -> dict[str, nn.Module]:
    lists = [
        (name, each)
        for name, each in named.items()
        if isinstance(each, nn.ModuleList) and len({type(child) for child in each}) == 1
    ]
    if not lists:
        return {}
    name, longest = max(lists, key=lambda pair: len(pair[1]))
    return {f"{name}.{index}": child for index, child in enumerate(longest)}


def _outermost(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Without blocks inside blocks, and each module under one name."""
    inner = {
        id(child) for block in blocks.values() for child in block.modules() if child is not block
    }
    seen: set[int] = {id(model)}
    kept: dict[str, nn.Module] = {}
    for name, block in blocks.items():
        if id(block) not in inner and id(block) not in seen:
            seen.add(id(block))
            kept[name] = block
    return kept
